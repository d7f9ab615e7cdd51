"""One response cut anywhere, seen by a client and by a sidecar with the same stamps: their columns are the same, and
what the definitions say of what was sent.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from hypothesis import example, given, settings
from hypothesis import strategies as st

from exporter.observation import Observation, Watch
from queries.compaction import compact
from sloscope.client.receipt_log import ReceiptLog
from sloscope.clock import FakeClock
from sloscope.contract import from_shorthand
from sloscope.definitions import StreamEnd, classify_end, normalise_finish, summarise
from sloscope.exposition import MetricStore
from sloscope.journal import JournalWriter
from sloscope.recorder import Recorder, encode
from sloscope.records import OUTPUT_TYPES
from tests.exporter.harness import settings_for
from tests.queries.journal_factory import MS, new_id
from tests.queries.test_compaction import select

ID = new_id(1)
CONTRACT = from_shorthand("ttft:300 itl_max:30")
_DELTAS = {"content": {"content": "x"}, "reasoning": {"reasoning_content": "x"}}
_DELTAS["tool"] = {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}  # type: ignore[dict-item]


@dataclass
class Piece:
    """One event as it is sent, and what it means."""

    data: bytes
    output: tuple[int, str] | None = None  # choice, type
    finish: tuple[int, str] | None = None
    counted: int | None = None  # tokens of its choice so far, by continuous usage
    total: int | None = None  # tokens of the request, by final usage
    error: bool = False
    done: bool = False


@dataclass
class Exchange:
    """A request, the bytes of its answer and when they came. All stamps are of one clock."""

    start_ns: int
    end_ns: int
    n_choices: int
    streaming: bool
    status: int
    content_type: str
    coding: str
    pieces: list[Piece]
    line_end: bytes
    wire: bytes
    reads: list[tuple[int, bytes]]  # stamp, bytes
    batch_ends: set[int]  # reads after which a batch is written
    transport: str
    left: str
    whole: dict[str, Any] | None = None  # the body, when it does not stream

    @property
    def complete(self) -> bool:
        return self.transport == "eof" and not self.left


def sent(pieces: list[Piece], line_end: bytes) -> list[bytes]:
    return [b"data: " + piece.data + line_end * 2 for piece in pieces]


@st.composite
def streams(draw: st.DrawFn, n_choices: int) -> list[Piece]:
    usage = draw(st.sampled_from(["none", "final", "continuous", "continuous and final"]))
    so_far = dict.fromkeys(range(n_choices), 0)
    pieces: list[Piece] = []

    def add(choice: int, delta: dict[str, Any], reason: str | None = None, **meaning: Any) -> None:
        body: dict[str, Any] = {"choices": [{"index": choice, "delta": delta, "finish_reason": reason}]}
        if usage.startswith("continuous"):
            body["usage"] = {"prompt_tokens": 7, "completion_tokens": so_far[choice]}
            meaning["counted"] = so_far[choice]
        pieces.append(Piece(orjson.dumps(body), **meaning))

    for choice in range(n_choices):
        add(choice, {"role": "assistant", "content": ""})
    choices, kinds = st.integers(0, n_choices - 1), st.sampled_from(OUTPUT_TYPES)
    for choice, kind, count in draw(st.lists(st.tuples(choices, kinds, st.integers(1, 4)), max_size=9)):
        so_far[choice] += count
        add(choice, _DELTAS[kind], output=(choice, kind))
    reasons = st.sampled_from(["stop", "length", "tool_calls", "abort", "y" * 70, None])
    for choice in range(n_choices):
        if (reason := draw(reasons)) is not None:
            add(choice, {}, reason, finish=(choice, reason))
    if usage.endswith("final"):
        total = sum(so_far.values())
        body = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": total}}
        pieces.append(Piece(orjson.dumps(body), total=total))
    if draw(st.integers(0, 5)) == 0:
        pieces.append(Piece(b'{"error": {"message": "x", "code": 500}}', error=True))
    if draw(st.booleans()):
        pieces.append(Piece(b"[DONE]", done=True))
    return pieces


@st.composite
def whole_bodies(draw: st.DrawFn, n_choices: int) -> dict[str, Any]:
    texts = draw(st.lists(st.sampled_from(["", "x"]), min_size=n_choices, max_size=n_choices))
    reason = draw(st.sampled_from(["stop", "length", "abort", None]))
    choices = [{"index": i, "message": {"content": text}, "finish_reason": reason} for i, text in enumerate(texts)]
    body: dict[str, Any] = {"choices": choices}
    if draw(st.booleans()):
        body["usage"] = {"prompt_tokens": 7, "completion_tokens": draw(st.integers(0, 9))}
    return body


def compressed(parts: list[bytes], coding: str) -> bytes:
    """Each part can be read when it has come, as a server that streams has to flush it."""
    if coding not in ("gzip", "deflate"):
        return b"".join(parts)
    packer = zlib.compressobj(wbits=31 if coding == "gzip" else 15)
    return b"".join(packer.compress(part) + packer.flush(zlib.Z_SYNC_FLUSH) for part in parts) + packer.flush()


@st.composite
def exchanges(draw: st.DrawFn) -> Exchange:
    n_choices, line_end = draw(st.sampled_from([1, 1, 2, 3])), draw(st.sampled_from([b"\n", b"\r\n"]))
    coding = draw(st.sampled_from(["", "", "gzip", "deflate", "br"]))
    whole = draw(whole_bodies(n_choices)) if draw(st.integers(0, 4)) == 0 else None
    pieces = [] if whole else draw(streams(n_choices))
    wire = compressed([orjson.dumps(whole)] if whole else sent(pieces, line_end), coding)
    transport, left = draw(st.sampled_from([("eof", "")] * 4 + [("reset", ""), ("timeout", ""), ("eof", "disconnect")]))
    if draw(st.integers(0, 3)) == 0:
        wire = wire[: draw(st.integers(0, len(wire)))]
    places = st.integers(1, max(1, len(wire) - 1))
    cuts = sorted({0, len(wire), *(place for place in draw(st.lists(places, max_size=12)) if place < len(wire))})
    start = draw(st.integers(0, 1000)) * MS
    stamps = itertools.accumulate(draw(st.lists(st.integers(0, 40 * MS), min_size=len(cuts), max_size=len(cuts))))
    reads = [(start + at, wire[a:b]) for at, (a, b) in zip(stamps, itertools.pairwise(cuts), strict=False)]
    return Exchange(
        start_ns=start,
        end_ns=(reads[-1][0] if reads else start) + draw(st.integers(0, MS)),
        n_choices=n_choices,
        streaming=True if whole is None else draw(st.booleans()),
        status=draw(st.sampled_from([200] * 9 + [500])),
        content_type="application/json" if whole else draw(st.sampled_from(["text/event-stream", "text/plain"])),
        coding=coding,
        pieces=pieces,
        line_end=line_end,
        wire=wire,
        reads=reads,
        batch_ends=draw(st.sets(st.integers(0, 12), max_size=3)),
        transport=transport,
        left=left,
        whole=whole,
    )


# --- what the definitions say


@dataclass
class Known:
    """What was received by when, from the pieces and the reads alone."""

    end: StreamEnd
    t_ns: list[int] = field(default_factory=list)
    choice: list[int] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    event_tokens: list[int] | None = None
    tokens: int | None = 0
    source: str | None = "assumed_one"
    done_ns: int | None = None


def plain_sizes(each: Exchange) -> list[tuple[int, int]]:
    """(stamp, bytes of plain text that had come by then) of each read."""
    unpacker = zlib.decompressobj(47) if each.coding in ("gzip", "deflate") else None
    size, sizes = 0, []
    for stamp, data in each.reads:
        size += len(data if unpacker is None else unpacker.decompress(data))
        sizes.append((stamp, size))
    return sizes


def known(each: Exchange) -> Known:
    end = StreamEnd(each.status, each.transport, each.left, {}, each.n_choices)
    out = Known(end)
    if each.status >= 400:
        return out
    if each.coding == "br":
        end.done, end.events = each.complete, int(bool(each.wire))
        if each.wire:
            out.tokens, out.source = None, None
        return out
    sizes = plain_sizes(each)
    if each.whole is not None:
        came = sizes[-1][1] if sizes else 0
        body = orjson.dumps(each.whole)
        if came < len(body):
            end.malformed = each.complete and came > 0
        elif each.complete:
            choices = each.whole["choices"]
            end.events = sum(bool(choice["message"]["content"]) for choice in choices)
            end.finishes = {c["index"]: c["finish_reason"] for c in choices if c["finish_reason"]}
            end.done = end.events > 0
            if end.events:
                out.tokens, out.source = None, None
            if "usage" in each.whole:
                out.tokens, out.source = each.whole["usage"]["completion_tokens"], "usage"
                end.tokens = out.tokens
        return out
    _streamed(each, out, sizes)
    return out


def _streamed(each: Exchange, out: Known, sizes: list[tuple[int, int]]) -> None:
    end = out.end
    finishes: dict[int, str] = {}
    counted: dict[int, int] = {}
    tokens: list[int | None] = []
    final: int | None = None
    at = 0
    for piece in each.pieces:
        whole_at = at + len(b"data: ") + len(piece.data)  # all of it came, if not its blank line
        at = whole_at + 2 * len(each.line_end)
        # A CR ends the blank line, whether an LF follows or not.
        stamps = [stamp for stamp, size in sizes if size >= at - len(each.line_end) + 1]
        if not stamps and (not sizes or sizes[-1][1] < whole_at):
            break
        stamp = stamps[0] if stamps else sizes[-1][0]  # what only the end completes came with the last read
        if piece.output is not None:
            choice, kind = piece.output
            out.t_ns.append(stamp)
            out.choice.append(choice)
            out.types.append(OUTPUT_TYPES.index(kind))
            tokens.append(None if piece.counted is None else piece.counted - counted.get(choice, 0))
            if piece.counted is not None:
                counted[choice] = piece.counted
        if piece.finish is not None:
            finishes[piece.finish[0]] = piece.finish[1][:64]
            if each.n_choices == 1 and piece.counted is not None:
                final = piece.counted
        # In the midst of continuous usage, a bare count is one of them.
        if piece.total is not None and (not counted or len(finishes) == each.n_choices):
            final = piece.total
        end.error = "500" if piece.error else end.error
        end.done = end.done or piece.done
        out.done_ns = stamp if piece.done else out.done_ns
    end.finishes, end.events, end.tokens = finishes, len(out.t_ns), final
    if counted and None not in tokens:
        out.event_tokens = [count for count in tokens if count is not None]
    out.tokens, out.source = len(out.t_ns), "assumed_one"
    if counted:
        out.tokens, out.source = sum(counted.values()), "continuous_usage"
    if final is not None:
        out.tokens, out.source = final, "usage"


def expected(each: Exchange) -> dict[str, Any]:
    facts = known(each)
    ended = classify_end(facts.end)
    end_ns = each.end_ns if facts.done_ns is None else facts.done_ns
    tokens, source = facts.tokens, facts.source
    if tokens is None and ended.outcome != "completed":
        tokens, source = 0, "assumed_one"  # the column of an answer that failed counts what came as events
    completed = ended.outcome == "completed"
    summary = summarise(
        each.start_ns,
        facts.t_ns,
        facts.choice,
        facts.types,
        each.n_choices,
        tokens,
        facts.event_tokens,
        completed_ns=end_ns if completed else None,
    )
    finish = [normalise_finish(reason) for _, reason in sorted(facts.end.finishes.items())]
    names = ("first", "last", "ttft", "ttft_visible", "ttft_worst", "ttft_visible_worst", "itl_max", "span", "e2e")
    return {
        **{f"{name}_ns": getattr(summary, f"{name}_ns") for name in names},
        "start_ns": each.start_ns,
        "end_ns": end_ns,
        "stream_end_ns": end_ns - each.start_ns,
        "events": summary.events,
        "span_tokens": summary.span_tokens,
        "tokens": tokens,
        "token_source": source,
        "outcome": ended.outcome,
        "reason": ended.reason,
        "finish_reason": None if not finish else finish[0] if len(set(finish)) == 1 else ",".join(finish),
        "http_status": each.status,
    }


# --- what the observers record


def client_records(each: Exchange, events: Path) -> None:
    log = ReceiptLog(events, FakeClock())
    recorder = log.open(ID, each.start_ns, streaming=each.streaming, n_choices=each.n_choices)
    recorder.response(each.status, {"content-type": each.content_type, "content-encoding": each.coding})
    for position, (stamp, data) in enumerate(each.reads):
        recorder.receive(stamp, data)
        if position in each.batch_ends:
            log.flush()
    recorder.end(each.end_ns, each.transport, each.left)
    log.close()
    assert log.lost == 0


def sidecar_records(each: Exchange, events: Path) -> None:
    clock, loop = FakeClock(), asyncio.new_event_loop()
    journal = Recorder(lambda: JournalWriter(events, "sidecar", clock, encode), clock, loop)
    configured = settings_for(events, "", ("http://127.0.0.1:1",))
    watch = Watch(configured, CONTRACT, MetricStore("sidecar", CONTRACT, 50), journal, clock)
    observation = Observation(watch, {"x-sloscope-request-id": ID}, "/v1/chat/completions", each.start_ns)
    observation.begin(orjson.dumps({"stream": each.streaming, "n": each.n_choices}), each.start_ns, "", None)
    observation.response_started(each.status, each.content_type, each.coding)
    for position, (stamp, data) in enumerate(each.reads):
        observation.forwarded(data, stamp, stamp, stamp)
        if position in each.batch_ends:
            observation.flush()
    observation.ended(each.transport, each.left, each.complete, each.end_ns)
    journal.close()
    loop.close()
    assert journal.lost == 0


def of_two_choices(*events: tuple[int, int]) -> Exchange:
    """(choice, tokens of it so far) by continuous usage, and then a reset. An event a millisecond."""
    pieces = []
    for choice, count in events:
        body = {"choices": [{"index": choice, "delta": {"content": "x"}}], "usage": {"completion_tokens": count}}
        pieces.append(Piece(orjson.dumps(body), output=(choice, "content"), counted=count))
    parts = sent(pieces, b"\n")
    reads = [(position * MS, part) for position, part in enumerate(parts, start=1)]
    kind, wire = "text/event-stream", b"".join(parts)
    return Exchange(0, 9 * MS, 2, True, 200, kind, "", pieces, b"\n", wire, reads, set(), "reset", "")


@settings(max_examples=60, deadline=None)
@given(each=exchanges())
@example(each=of_two_choices((0, 2), (1, 3), (0, 4)))  # cut: 4 tokens of choice 0 and 3 of choice 1 are 7
def test_client_sidecar_and_definitions_say_the_same_of_one_stream(each: Exchange) -> None:
    said = expected(each)
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder)
        client_records(each, events)
        sidecar_records(each, events)
        assert compact(events, settle_ns=0).problems == []
        columns = [f"{observer}_{name}" for observer in ("client", "sidecar") for name in said]
        (row,) = select(events, f"select {', '.join(columns)} from {{requests}}")
        assert dict(zip(columns, row, strict=True)) == {
            f"{observer}_{name}": value for observer in ("client", "sidecar") for name, value in said.items()
        }


def test_a_cut_stream_of_two_choices_has_the_tokens_of_both() -> None:
    said = expected(of_two_choices((0, 2), (1, 3), (0, 4)))
    assert (said["tokens"], said["token_source"]) == (7, "continuous_usage")  # 4 + 3
    assert (said["outcome"], said["reason"]) == ("failed", "upstream_reset")
