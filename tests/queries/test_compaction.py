"""Journals become tables in which each request stands exactly once, whatever is killed, late, torn or open."""

from functools import cache
from pathlib import Path
from typing import Any

import duckdb
import pytest

from queries import tables
from queries.compaction import compact
from queries.runner import Session
from sloscope import contract as contracts
from sloscope import records
from sloscope.clock import FakeClock
from sloscope.errors import JournalError
from sloscope.journal import JournalWriter, Manifest, Tail, journal_files, read_journal
from sloscope.recovery import recover
from tests.queries.journal_factory import MS, SECOND, new_id, write_request

WALL = 1_700_000_000 * SECOND
OUTCOME_COLUMNS = ("outcome", "reason", "requests", "qualified", "output_tokens")


@cache
def _duckdb() -> duckdb.DuckDBPyConnection:
    # Files are made anew under their names here: nothing of them may be kept.
    return duckdb.connect(config={"enable_external_file_cache": "false"})


def select(events: Path, sql: str) -> list[tuple[Any, ...]]:
    """The question with each table's name in braces: `select … from {requests}`."""
    manifest = Manifest.load(events)
    named = {name: tables.table_sql(manifest, events, name) for name in tables.TABLES}
    return _duckdb().execute(sql.format(**named)).fetchall()


def one(events: Path, columns: str, table: str = "requests") -> tuple[Any, ...]:
    (row,) = select(events, f"select {columns} from {{{table}}}")
    return row


def test_an_empty_directory_has_every_table_with_every_column_and_no_row(tmp_path: Path) -> None:
    report = compact(tmp_path)
    assert (report.requests_written, report.journal_bytes, report.problems) == (0, 0, [])
    for name, columns in tables.TABLES.items():
        cursor = duckdb.connect().execute(f"select * from {tables.table_sql(Manifest.load(tmp_path), tmp_path, name)}")
        assert [d[0] for d in cursor.description] == [c.name for c in columns]
        assert cursor.fetchall() == []


def test_tables_of_another_schema_are_made_anew_from_the_journals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with JournalWriter(tmp_path, "client", FakeClock()) as client:
        write_request(client, "client", new_id(1), 0, [10 * MS])
    with monkeypatch.context() as older:
        older.setattr(tables, "fingerprint", lambda: "older")
        assert compact(tmp_path).requests_written == 1
        assert compact(tmp_path).requests_written == 0
    before = {path for files in Manifest.load(tmp_path).tables.values() for path in files}
    assert compact(tmp_path).requests_written == 1
    manifest = Manifest.load(tmp_path)
    assert before.isdisjoint(path for files in manifest.tables.values() for path in files)
    assert one(tmp_path, "count(*)") == (1,) and compact(tmp_path).requests_written == 0


def test_tables_of_another_schema_are_kept_when_a_journal_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with JournalWriter(tmp_path, "client", FakeClock()) as client:
        write_request(client, "client", new_id(1), 0, [10 * MS])
    compact(tmp_path)
    kept = (tmp_path / "manifest.json").read_bytes()
    client.path.unlink()
    monkeypatch.setattr(tables, "fingerprint", lambda: "newer")
    with pytest.raises(JournalError, match="written by another version"):
        compact(tmp_path)
    assert (tmp_path / "manifest.json").read_bytes() == kept


def test_a_missing_directory_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"nowhere.*does not exist"):
        compact(tmp_path / "nowhere")


def test_parquet_columns_have_the_names_and_types_of_the_schema(tmp_path: Path) -> None:
    with JournalWriter(tmp_path, "client", FakeClock()) as client:
        write_request(client, "client", new_id(1), 0, [10 * MS])
    compact(tmp_path)
    for name in tables.PER_REQUEST[:3]:
        cursor = duckdb.connect().execute(
            f"describe select * from {tables.table_sql(Manifest.load(tmp_path), tmp_path, name)}"
        )
        assert [(row[0], row[1]) for row in cursor.fetchall()] == [(c.name, c.type) for c in tables.TABLES[name]]


def test_a_completed_answer_without_receipts_was_received_when_it_ended(tmp_path: Path) -> None:
    """It did not stream, whatever was asked for, or streamed a tool call without arguments. 305 − 5 = 300 ms."""
    whole: dict[str, Any] = {"begin": {"streaming": False}, "end_ns": 305 * MS}
    with JournalWriter(tmp_path, "client", FakeClock()) as client:
        write_request(client, "client", new_id(1), 5 * MS, **whole)
        write_request(
            client, "client", new_id(2), 5 * MS, **whole | {"end": {"outcome": "failed", "reason": "timeout"}}
        )
        write_request(client, "client", new_id(3), 5 * MS, **whole | {"begin": {"streaming": True}})
    compact(tmp_path)
    rows = select(
        tmp_path, "select client_e2e_ns, client_stream_end_ns, client_ttft_ns from {requests} order by request_id"
    )
    assert rows == [(300 * MS, 300 * MS, None), (None, 300 * MS, None), (300 * MS, 300 * MS, None)]


def test_three_observers_of_one_request_stand_side_by_side_in_one_row(tmp_path: Path) -> None:
    clock = FakeClock()
    with (
        JournalWriter(tmp_path, "client", clock) as client,
        JournalWriter(tmp_path, "sidecar", clock) as sidecar,
        JournalWriter(tmp_path, "engine", clock) as engine,
    ):
        ours = {"request_id": new_id(1)}
        write_request(engine, "engine", new_id(1), 3 * MS, [100 * MS, 130 * MS], handed_ns=[101 * MS, 131 * MS])
        for at, before, after in ((4, None, "WAITING"), (9, "WAITING", "PREFILL")):
            engine.write(records.make("state", **ours, at_ns=at * MS, from_state=before, to_state=after))
        write_request(sidecar, "sidecar", new_id(1), 2 * MS, [102 * MS, 132 * MS], forwarded_ns=[103 * MS, 133 * MS])
        write_request(
            client,
            "client",
            new_id(1),
            1 * MS,
            [104 * MS, 135 * MS],
            end_ns=136 * MS,
            begin={"intended_ns": 0, "class": "chat", "n_choices": 1, "labels": {"warmup": True}},
            end={"output_tokens": 2, "token_source": "usage", "finish_reason": ["eos"]},
        )
    compact(tmp_path)
    # client: 104 − 1 = 103, gap 135 − 104 = 31, end 136 − 1 = 135; sidecar: 102 − 2 = 100; engine: 100 − 3 = 97.
    row = one(
        tmp_path,
        "class, warmup, client_ttft_ns, client_itl_max_ns, client_stream_end_ns, client_dispatch_lag_ns,"
        " client_ttft_intended_ns, sidecar_ttft_ns, engine_ttft_ns",
    )
    assert row == ("chat", True, *(ms * MS for ms in (103, 31, 135, 1, 104, 100, 97)))
    row = one(
        tmp_path,
        "engine_queued_ns, engine_prefill_start_ns, engine_first_computed_ns, engine_first_handed_ns,"
        " sidecar_upstream_first_ns, sidecar_forwarded_first_ns",
    )
    assert row == tuple(ms * MS for ms in (4, 9, 100, 101, 102, 103))
    assert one(
        tmp_path, "client_tokens, client_token_source, sidecar_tokens, sidecar_token_source, engine_token_source"
    ) == (2, "usage", 2, "assumed_one", "engine")
    assert one(tmp_path, "client_finish_reason, client_alignment, sidecar_alignment, engine_preemptions") == (
        "stop",
        "ordinal",
        "ordinal",
        0,
    )
    assert one(tmp_path, "client_t_ns, engine_computed_ns, engine_cum_tokens", "chunks") == (
        [104 * MS, 135 * MS],
        [100 * MS, 130 * MS],
        [1, 2],
    )


def test_receipts_of_several_pages_in_one_file_are_placed_each_by_its_own_clock(tmp_path: Path) -> None:
    """A page's stamps begin at 0, the recorder's clock is old, and a page reports its requests as they end."""
    clock = FakeClock(3600 * SECOND, WALL)
    #        (page, sent after it opened, its opening after WALL), s
    pages = [("a", 20, 100), ("b", 1, 150), ("a", 5, 100), ("b", 30, 150), ("c", 2, 10)]
    with JournalWriter(tmp_path, "client", clock) as writer:
        for number, (page, sent, opened) in enumerate(pages):
            sent_ns, clock_id = sent * SECOND, f"browser:{page}"
            wall_ns = WALL + (opened + sent) * SECOND
            writer.write(records.make("clock", mono_ns=sent_ns, wall_ns=wall_ns, clock_id=clock_id))
            write_request(writer, "client", new_id(number), sent_ns, [sent_ns + MS], clock_id=clock_id)
            writer.write(records.make("clock", mono_ns=3600 * SECOND, wall_ns=WALL, clock_id=clock.clock_id))
        write_request(writer, "client", new_id(9), 3600 * SECOND, [3600 * SECOND + MS])
    compact(tmp_path)
    placed = select(tmp_path, "select client_arrival_at_ns from {requests} order by request_id")
    assert [(at - WALL) // SECOND for (at,) in placed] == [120, 151, 105, 180, 12, 0]


def test_an_open_request_is_offered_with_a_null_outcome_and_becomes_final_later(tmp_path: Path) -> None:
    clock = FakeClock(wall_ns=WALL)
    client = JournalWriter(tmp_path, "client", clock)
    write_request(client, "client", new_id(1), 0, [10 * MS], ended=False)
    report = compact(tmp_path)
    assert (report.requests_written, report.requests_pending, report.requests_open) == (0, 1, 1)
    assert one(tmp_path, "client_observed, client_outcome, client_ttft_ns") == (True, None, 10 * MS)

    client.write(records.make("end", request_id=new_id(1), outcome="completed", end_ns=20 * MS))
    report = compact(tmp_path)
    assert (report.requests_written, report.requests_pending) == (1, 0)
    assert one(tmp_path, "client_outcome, client_end_at_ns - client_arrival_at_ns") == ("completed", 20 * MS)
    client.close()


def test_an_observer_that_appears_after_the_row_was_final_joins_the_same_row(tmp_path: Path) -> None:
    with JournalWriter(tmp_path, "sidecar", FakeClock()) as sidecar:
        write_request(sidecar, "sidecar", new_id(1), 0, [10 * MS])
        write_request(sidecar, "sidecar", new_id(2), 0, [12 * MS])
    assert compact(tmp_path).requests_written == 2
    with JournalWriter(tmp_path, "client", FakeClock()) as client:
        write_request(client, "client", new_id(1), 0, [14 * MS])
    report = compact(tmp_path)
    assert (report.requests_written, report.late_merged) == (1, 1)
    rows = select(tmp_path, "select request_id, sidecar_ttft_ns, client_ttft_ns from {requests} order by 1")
    assert rows == [(new_id(1), 10 * MS, 14 * MS), (new_id(2), 12 * MS, None)]
    assert select(tmp_path, "select count(*) from {chunks}") == [(2,)]


def test_a_late_reason_refines_a_disconnect_of_a_final_row(tmp_path: Path) -> None:
    with JournalWriter(tmp_path, "sidecar", FakeClock()) as sidecar:
        left = {"outcome": "cancelled", "reason": "disconnect"}
        write_request(sidecar, "sidecar", new_id(1), 0, [10 * MS], end=left)
    compact(tmp_path)
    late = records.make(
        "late", request_id=new_id(1), observer="sidecar", outcome="cancelled", reason="voluntary", kv_freed_ns=5
    )
    with JournalWriter(tmp_path, "sidecar", FakeClock(mono_ns=SECOND)) as sidecar:
        sidecar.write(late)
    assert compact(tmp_path).late_merged == 1
    assert one(tmp_path, "sidecar_outcome, sidecar_reason, engine_kv_freed_ns") == ("cancelled", "voluntary", 5)


def test_a_late_report_names_the_reason_of_a_cancel_and_never_makes_it_a_completed_request(tmp_path: Path) -> None:
    with JournalWriter(tmp_path, "sidecar", FakeClock()) as sidecar:
        left = {"outcome": "cancelled", "reason": "disconnect"}
        write_request(sidecar, "sidecar", new_id(1), 0, [10 * MS], end=left)
        for said in ({"outcome": "completed"}, {"outcome": "cancelled", "reason": "client_timeout"}):
            sidecar.write(records.make("late", request_id=new_id(1), observer="sidecar", **said))
    compact(tmp_path)
    assert one(tmp_path, "sidecar_outcome, sidecar_reason") == ("cancelled", "client_timeout")


LEFT, VOLUNTARY, SLOW = ("cancelled", "disconnect"), ("cancelled", "voluntary"), ("cancelled", "slow_reader")
FAILED, COMPLETED = ("failed", "truncated"), ("completed", "")


@pytest.mark.parametrize(
    ("observer", "server", "client", "refined"),
    [
        ("sidecar", LEFT, VOLUNTARY, VOLUNTARY),
        ("sidecar", LEFT, ("cancelled", "client_timeout"), ("cancelled", "client_timeout")),
        ("engine", LEFT, VOLUNTARY, VOLUNTARY),
        ("sidecar", LEFT, LEFT, LEFT),
        # The client explains why it left, not what the service did: other ends stand as each observer saw them.
        ("sidecar", LEFT, FAILED, LEFT),
        ("sidecar", LEFT, COMPLETED, LEFT),
        ("sidecar", SLOW, VOLUNTARY, SLOW),
        ("sidecar", FAILED, VOLUNTARY, FAILED),
        ("sidecar", COMPLETED, VOLUNTARY, COMPLETED),
        # Nor does a server know better than the client why the client left.
        ("sidecar", SLOW, LEFT, SLOW),
    ],
)
def test_the_clients_own_reason_refines_a_disconnect_that_a_server_saw_and_nothing_else(
    tmp_path: Path, observer: str, server: tuple[str, str], client: tuple[str, str], refined: tuple[str, str]
) -> None:
    for name, (outcome, reason) in ((observer, server), ("client", client)):
        with JournalWriter(tmp_path, name, FakeClock()) as journal:
            write_request(journal, name, new_id(1), 0, [10 * MS], end={"outcome": outcome, "reason": reason})
        compact(tmp_path)  # the client's word may come after the server's row was final
    assert one(tmp_path, f"{observer}_outcome, {observer}_reason") == refined
    assert one(tmp_path, "client_outcome, client_reason") == client


def test_a_late_reason_comes_before_the_clients_own_end(tmp_path: Path) -> None:
    left = {"outcome": "cancelled", "reason": "disconnect"}
    with JournalWriter(tmp_path, "sidecar", FakeClock()) as sidecar:
        write_request(sidecar, "sidecar", new_id(1), 0, [10 * MS], end=left)
        said = {"outcome": "cancelled", "reason": "client_timeout"}
        sidecar.write(records.make("late", request_id=new_id(1), observer="sidecar", **said))
    with JournalWriter(tmp_path, "client", FakeClock()) as client:
        write_request(client, "client", new_id(1), 0, [10 * MS], end=left | {"reason": "voluntary"})
    compact(tmp_path)
    assert one(tmp_path, "sidecar_reason, client_reason") == ("client_timeout", "voluntary")


def test_a_dead_recorder_leaves_unfinished_once_however_often_recovery_runs(tmp_path: Path) -> None:
    client = JournalWriter(tmp_path, "client", FakeClock(wall_ns=WALL))
    write_request(client, "client", new_id(1), 0, [10 * MS, 25 * MS], ended=False)
    assert recover(tmp_path, "client") == 0, "it is still alive"
    client.close()
    assert (recover(tmp_path, "sidecar"), recover(tmp_path, "client"), recover(tmp_path, "client")) == (0, 1, 0)
    report = compact(tmp_path)
    assert (report.recovered, report.requests_written) == (0, 1)
    assert one(tmp_path, "client_outcome, client_reason, client_end_ns, client_end_at_ns") == (
        "unfinished",
        "recorder_lost",
        25 * MS,
        WALL + 25 * MS,
    )


def test_the_tokens_of_a_lost_request_are_those_that_its_events_carried(tmp_path: Path) -> None:
    with JournalWriter(tmp_path, "sidecar", FakeClock(wall_ns=WALL)) as sidecar:
        write_request(sidecar, "sidecar", new_id(1), 0, [10 * MS, 20 * MS], tokens=[3, 2], ended=False)  # 3 + 2 = 5
        write_request(sidecar, "sidecar", new_id(2), 0, [10 * MS, 20 * MS], tokens=[3, None], ended=False)
    compact(tmp_path)
    rows = select(tmp_path, "select sidecar_tokens, sidecar_token_source from {requests} order by request_id")
    assert rows == [(5, "continuous_usage"), (2, "assumed_one")]


def test_compaction_closes_what_a_dead_recorder_left_open(tmp_path: Path) -> None:
    with JournalWriter(tmp_path, "sidecar", FakeClock(wall_ns=WALL)) as sidecar:
        write_request(sidecar, "sidecar", new_id(1), 7, ended=False)
    report = compact(tmp_path)
    assert (report.recovered, report.requests_written, report.requests_pending) == (1, 1, 0)
    assert one(tmp_path, "sidecar_reason, sidecar_end_ns, sidecar_ttft_ns") == ("recorder_lost", 7, None)
    assert (recover(tmp_path, "sidecar"), compact(tmp_path).recovered) == (0, 0)


def test_what_a_run_closed_at_its_end_is_final_and_unfinished_whatever_the_window_rule(tmp_path: Path) -> None:
    with JournalWriter(tmp_path, "client", FakeClock(wall_ns=WALL)) as client:
        write_request(client, "client", new_id(1), 0, [10 * MS, 20 * MS])
        closed = {"outcome": "unfinished", "reason": "window_closed", "output_tokens": 2}
        write_request(client, "client", new_id(2), 0, [10 * MS, 20 * MS], end=closed, end_ns=500 * MS)
        report = compact(tmp_path)
    assert (report.requests_written, report.requests_open, report.bad_lines) == (2, 0, 0)
    # Ends 0.5 s after the window opened: before the cut of `drain`, and before and after that of `unfinished`.
    for rule in ('rule = "drain"', 'rule = "unfinished"\ngrace = "1s"', 'rule = "unfinished"'):
        text = f'version = 1\ndefault_class = "c"\n[classes.c]\nttft = "300ms"\n[window]\n{rule}\n'
        with Session(tmp_path, contracts.parse(text), window=(WALL, WALL + 100 * MS), compact_first=False) as session:
            rows = [{k: row[k] for k in OUTCOME_COLUMNS} for row in session.run("outcomes").rows if row["requests"]]
        assert rows == [
            {"outcome": "completed", "reason": "", "requests": 1, "qualified": 1, "output_tokens": 2},
            {"outcome": "unfinished", "reason": "window_closed", "requests": 1, "qualified": 0, "output_tokens": 2},
        ]


def test_an_end_that_compaction_writes_stands_under_the_clock_anchor_of_the_writer_that_died(tmp_path: Path) -> None:
    clock = FakeClock(mono_ns=5, wall_ns=777, clock_id="fake:earlier-boot:0")
    with JournalWriter(tmp_path, "client", clock) as client:
        write_request(client, "client", new_id(1), 10, ended=False)
    known = set(journal_files(tmp_path))
    compact(tmp_path)
    (recovered,) = set(journal_files(tmp_path)) - known
    *_, anchor, last = list(read_journal(Tail(recovered)))
    assert last["kind"] == "end"
    assert anchor == records.make("clock", mono_ns=5, wall_ns=777, clock_id="fake:earlier-boot:0")


def test_a_pass_without_news_changes_nothing(tmp_path: Path) -> None:
    with JournalWriter(tmp_path, "client", FakeClock()) as client:
        write_request(client, "client", new_id(1), 0, [10 * MS])
    compact(tmp_path)
    before = Manifest.path(tmp_path).read_bytes()
    report = compact(tmp_path)
    assert (report.requests_written, report.journal_bytes, report.generation) == (0, 0, 1)
    assert Manifest.path(tmp_path).read_bytes() == before
