"""A block read column by column says what its lines say when they are read one by one."""

import random
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest

from queries import batches, scan
from queries.batches import Batch
from queries.compaction import compact
from queries.decode import decode
from sloscope import records
from sloscope.clock import FakeClock
from sloscope.journal import JournalWriter, Manifest
from tests.queries.journal_factory import MS, SECOND, new_id, write_request


def batch_line(drawn: random.Random, kind: str, **odd: Any) -> bytes:
    """A record with the names in the orders in which the recorders write them, and values of any width."""
    size = drawn.randint(1, 6)
    stamp = drawn.choice([0, 9, 10**8 - 2, 10**8, 4 * 10**15, 10**18 - 9])
    stamps = {
        name: [stamp + drawn.randrange(9) for _ in range(size)]
        for name in ("t_ns", "forwarded_ns", "computed_ns", "handed_ns", "written_ns")
    }
    key = {"request_id": new_id(drawn.randrange(1000)), "attempt": drawn.choice([None, 0, 12])}
    first = {"ordinal0": drawn.choice([0, 7, 123_456])}
    choice, types = [drawn.randrange(3) for _ in range(size)], [drawn.randrange(3) for _ in range(size)]
    tokens = [drawn.randrange(1, 2000) for _ in range(size)]
    if kind == "emit":
        record = records.make(
            kind, **key, **first, choice=choice, cum_tokens=tokens, computed_ns=stamps["computed_ns"],
            handed_ns=stamps["handed_ns"], written_ns=stamps["written_ns"], step_id=tokens,
        )  # fmt: skip
    elif drawn.random() < 0.5:
        forwarded = {"forwarded_ns": stamps["forwarded_ns"]}
        record = records.make(kind, **key, **forwarded, **first, t_ns=stamps["t_ns"], choice=choice, type=types)
    else:
        record = records.make(kind, **key, **first, t_ns=stamps["t_ns"], choice=choice, type=types, tokens=tokens)
    return orjson.dumps(record | odd)


def taken(lines: list[bytes], kind: str) -> dict[int, Batch]:
    found = scan.Text(b"".join(line + b"\n" for line in lines)).batches(kind)
    return {number: batch for each in found for number, batch in zip(each.lines.tolist(), each.batches, strict=True)}


def said(batch: Batch) -> Any:
    part = slice(batch.start, batch.start + batch.events)
    columns = {name: (values.dtype, values[part].tolist()) for name, values in batch.columns.values.items()}
    return batch.request_id, batch.attempt, batch.ordinal0, columns


@pytest.mark.parametrize("kind", ["chunks", "emit"])
@pytest.mark.parametrize("seed", range(5))
def test_every_line_as_recorders_write_it_is_taken_and_says_the_same_as_alone(kind: str, seed: int) -> None:
    drawn = random.Random(seed)
    lines = [batch_line(drawn, kind) for _ in range(300)]
    found = taken(lines, kind)
    # Of a shape that fewer lines have than it is worth, some are left.
    assert len(found) >= len(lines) - scan.FEW_LINES, seed
    for number, batch in found.items():
        alone = decode(lines[number])
        assert isinstance(alone, Batch) and said(batch) == said(alone), lines[number]


def damaged(drawn: random.Random, line: bytes) -> bytes:
    at = drawn.randrange(len(line))
    change = drawn.randrange(4)
    if change == 0:
        return line[:at] + bytes([drawn.choice(b'0159,[]{}":-. eanZ')]) + line[at + 1 :]
    if change == 1:
        return line[:at] + line[at + 1 :]
    if change == 2:
        return line[:at] + drawn.choice([b"0", b",", b" ", b"[", b"1" * 20, b"null", b"-"]) + line[at:]
    return line[:at]


@pytest.mark.parametrize("kind", ["chunks", "emit"])
@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_line_is_taken_only_where_it_says_the_same_as_alone(kind: str, seed: int) -> None:
    drawn = random.Random(seed)
    lines = [batch_line(drawn, kind) for _ in range(200)]
    lines = [line if drawn.random() < 0.5 else damaged(drawn, line) for line in lines]
    for number, batch in taken(lines, kind).items():
        alone = decode(lines[number])  # raises where it is refused
        assert isinstance(alone, Batch) and said(batch) == said(alone), (seed, lines[number])


@pytest.mark.parametrize(
    "odd",
    [
        {"t_ns": [1, None]},
        {"t_ns": [1, -2]},
        {"t_ns": [1, 2.5]},
        {"t_ns": [1, 10**18]},
        {"t_ns": []},
        {"t_ns": [1, 2, 3]},
        {"type": [0, 3]},
        {"choice": [0, 2**31]},
        {"request_id": "x" * 26},
        {"request_id": new_id(1).lower()},
        {"v": 2},
        {"prompt": [1, 2]},
        {"ordinal0": -1},
    ],
)  # fmt: skip
def test_what_is_not_usual_is_left_to_the_reader_of_single_lines(odd: dict[str, Any]) -> None:
    usual = {"v": 1, "kind": "chunks", "request_id": new_id(1), "ordinal0": 0}
    usual |= {"t_ns": [1, 2], "choice": [0, 0], "type": [0, 0]}
    lines = [orjson.dumps(usual)] * 20
    lines[7] = orjson.dumps(usual | odd)
    assert set(taken(lines, "chunks")) == set(range(20)) - {7}


def write_random(events: Path, drawn: random.Random) -> None:
    """Requests at all observers: several choices, lost and repeated batches, attempts, open ends and bad lines."""
    clocks = {observer: FakeClock() for observer in records.OBSERVERS}
    writers = {observer: JournalWriter(events, observer, clocks[observer]) for observer in records.OBSERVERS}
    for number in range(60):
        for observer in drawn.sample(records.OBSERVERS, drawn.randint(1, 3)):
            now = clocks[observer].mono
            size = drawn.randrange(30)
            stamps = [now + 10 * MS + k * drawn.randrange(1, 30) * MS for k in range(size)]
            choice = sorted(drawn.choices(range(3), k=size)) if drawn.random() < 0.2 else None
            tokens = [drawn.randrange(1, 5) for _ in range(size)] if drawn.random() < 0.5 else None
            write_request(
                writers[observer], observer, new_id(number), now, stamps, choice=choice, batch=drawn.choice([1, 7, 50]),
                tokens=None if observer == "engine" else tokens,
                forwarded_ns=stamps if observer == "sidecar" and drawn.random() < 0.8 else None,
                ended=drawn.random() < 0.9, attempt=drawn.choice([None, None, 0, 1]),
            )  # fmt: skip
            clocks[observer].advance(SECOND)
    for writer in writers.values():
        writer.close()
        lines = writer.path.read_bytes().splitlines(keepends=True)
        for _ in range(5):  # lost, repeated, out of order, damaged
            at = drawn.randrange(5, len(lines))
            change = drawn.randrange(4)
            if change == 0:
                del lines[at]
            elif change == 1:
                lines.insert(at, lines[at])
            elif change == 2:
                lines[at - 1 : at + 1] = reversed(lines[at - 1 : at + 1])
            else:
                lines[at] = damaged(drawn, lines[at][:-1]).replace(b"\n", b"") + b"\n"
        writer.path.write_bytes(b"".join(lines))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("held", [100, 1_000_000])
def test_tables_are_the_same_when_every_line_is_read_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, held: int
) -> None:
    monkeypatch.setattr("queries.compaction.HELD_EVENTS", held)
    monkeypatch.setattr("queries.intake.BLOCK", 5000)
    found = []
    for few in (1, 10**9):
        events = tmp_path / str(few)
        write_random(events, random.Random(seed))
        for number, path in enumerate(sorted((events / "journal").glob("*/*.jsonl"))):
            path.rename(path.with_name(f"boot-1-{number}-0.jsonl"))
        monkeypatch.setattr(scan, "FEW_LINES", few)
        report = compact(events, now_wall_ns=2 * 10**18)
        report.seconds = 0.0
        files = Manifest.load(events).tables
        tables = {name: [pq.read_table(events / path) for path in paths] for name, paths in files.items()}
        found.append((report, tables))
    assert found[0][0] == found[1][0], seed
    assert found[0][0].requests_written > 10 and found[0][0].receipts > 300, "there is something to compare"
    assert found[0][1] == found[1][1], seed


def test_batches_that_are_moved_keep_what_they_say_and_nothing_else() -> None:
    drawn = random.Random(3)
    lines = [batch_line(drawn, "chunks") for _ in range(100)]
    found = list(taken(lines, "chunks").values())
    kept = [batch for number, batch in enumerate(found) if number % 3 == 0]
    moved = batches.moved_together(kept)
    assert [said(batch) for batch in moved] == [said(batch) for batch in kept]
    assert sum({id(b.columns): b.columns.size for b in moved}.values()) == sum(batch.events for batch in kept)
