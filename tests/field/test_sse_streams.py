"""Streams recorded from real servers, cut in every way, against events written down by hand.

sse_expected/<stream>.json holds, counted from the recorded file by eye and grep: dispatched
events, the position of the first one with output (from 1), output kinds per choice run-length
encoded, finish reasons, usage, error classes and the rest. Nothing there came from the decoder.
"""

from __future__ import annotations

import copy
import functools
import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import yaml

from sloscope.sse import StreamDecoder, StreamEvent

EXPECTED = Path(__file__).parent / "sse_expected"
STREAMS = sorted(path.stem for path in EXPECTED.glob("*.json"))
FORMATS = ("sse", "chunks.txt", "json", "yml", "yaml")


# Each event is understood once per session, not once per cut: the cuts are about framing.
@functools.lru_cache(maxsize=1 << 14)
def understood(data: bytes, is_error: bool) -> StreamEvent | None:
    return StreamDecoder()._decode(data, is_error)


class Framing(StreamDecoder):
    __slots__ = ()

    def _decode(self, data: bytes, is_error: bool) -> StreamEvent | None:
        return understood(data, is_error)


def as_event_stream(chunks: list[Any]) -> bytes:
    return b"".join(b"data: %s\n\n" % json.dumps(chunk).encode() for chunk in chunks)


def recorded_stream(path: Path) -> bytes:
    """The body of the response as it went over the wire, as far as the recording keeps it."""
    if path.suffix == ".sse":
        return path.read_bytes()
    text = path.read_text(encoding="utf-8")
    if path.name.endswith(".chunks.txt"):
        return as_event_stream([json.loads(line) for line in text.splitlines() if line])
    if path.suffix == ".json":
        return as_event_stream(json.loads(text))
    cassette = yaml.safe_load(text)
    (exchange,) = cassette.get("http_interactions") or cassette["interactions"]
    return exchange["response"]["body"]["string"].encode()


@pytest.fixture(params=STREAMS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def stream(name: str, field_data: Path) -> bytes:
    (path,) = (found for suffix in FORMATS if (found := field_data / "sse" / f"{name}.{suffix}").exists())
    return recorded_stream(path)


@pytest.fixture
def expected(name: str) -> dict[str, Any]:
    return json.loads((EXPECTED / f"{name}.json").read_text())


def decode(*reads: bytes) -> tuple[list[StreamEvent], bool]:
    decoder = Framing()
    events = [event for read in reads for event in decoder.feed(read)]
    return events + decoder.finish(), decoder.torn


def one_byte_at_a_time(stream: bytes) -> tuple[list[StreamEvent], bool]:
    return decode(*(stream[i : i + 1] for i in range(len(stream))))


def summary(events: list[StreamEvent], torn: bool) -> dict[str, Any]:
    """What the expectations say, from decoded events."""
    outputs = [output for event in events for output in event.outputs]
    finishes = [finish for event in events for finish in event.finishes]
    choices = sorted({output.choice for output in outputs} | {choice for choice, _ in finishes})
    return {
        "events": len(events),
        "first_output_event": next((i for i, event in enumerate(events, 1) if event.outputs), None),
        "choices": {
            str(choice): {
                "outputs": [
                    [kind, len(list(run))]
                    for kind, run in groupby(output.type for output in outputs if output.choice == choice)
                ],
                "finishes": [reason for index, reason in finishes if index == choice],
            }
            for choice in choices
        },
        "usage": [list(event.usage) for event in events if event.usage],
        "usage_only_events": sum(event.raw_usage_only for event in events),
        "errors": [event.error for event in events if event.error],
        "done": any(event.done for event in events),
        "torn": torn,
        "malformed": sum(event.malformed for event in events),
        "recognised": sum(event.recognised for event in events),
        "models": sorted({event.model for event in events if event.model}),
    }


def test_every_recorded_stream_has_an_expectation(field_data: Path) -> None:
    recorded = {
        path.name.removesuffix(f".{suffix}")
        for suffix in FORMATS
        for path in (field_data / "sse").glob(f"*.{suffix}")
        if not path.name.endswith(".meta.json")
    }
    assert recorded == set(STREAMS)


def test_a_stream_read_whole_gives_the_events_written_down(stream: bytes, expected: dict[str, Any]) -> None:
    assert summary(*decode(stream)) == expected


def test_a_stream_read_one_byte_at_a_time_gives_the_same_events(stream: bytes) -> None:
    assert one_byte_at_a_time(stream) == decode(stream)


@pytest.mark.parametrize("line_end", [b"\r\n", b"\r"], ids=["crlf", "cr"])
def test_other_line_ends_give_the_same_events(stream: bytes, line_end: bytes) -> None:
    converted = stream.replace(b"\n", line_end)
    assert decode(converted) == decode(stream)
    assert one_byte_at_a_time(converted) == decode(stream)


def test_a_leading_bom_changes_nothing(stream: bytes) -> None:
    marked = b"\xef\xbb\xbf" + stream
    assert decode(marked) == decode(stream)
    assert one_byte_at_a_time(marked) == decode(stream)


def block_starts(stream: bytes, line_end: bytes) -> list[int]:
    """Offsets where an event or comment block begins, and the end of the stream."""
    blank = line_end * 2
    starts = [0]
    while (found := stream.find(blank, starts[-1])) >= 0:
        starts.append(found + len(blank))
    return starts


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"], ids=["lf", "crlf", "cr"])
def test_a_cut_at_any_byte_gives_the_same_events(stream: bytes, line_end: bytes) -> None:
    """Each cut has a whole block before and after the one that it falls in, in the same two reads.

    A cut in a long stream need not decode all of it: the decoder is copied as it stood before the
    block ahead. Every block is the cut one once, so every byte of the stream is a cut; in a long
    one of other line ends every byte beside an end, where alone they differ. A shallow copy will
    do, for at the end of a block the decoder keeps nothing, which `torn` confirms.
    """
    stream = stream.replace(b"\n", line_end)
    is_any_cut = line_end == b"\n" or len(stream) < 5000
    starts = block_starts(stream, line_end)
    assert starts[-1] == len(stream), "these recordings end with a blank line"
    decoder = Framing()
    decoded = 0
    for i in range(len(starts) - 1):
        begin, end = starts[max(i - 1, 0)], starts[min(i + 2, len(starts) - 1)]
        uncut = copy.copy(decoder).feed(stream[begin:end])
        for cut in range(starts[i], starts[i + 1]):
            if not is_any_cut and b"\r" not in stream[max(cut - 2, 0) : cut + 2]:
                continue
            resumed = copy.copy(decoder)
            assert resumed.feed(stream[begin:cut]) + resumed.feed(stream[cut:end]) == uncut, cut
            assert resumed.finish() == [] and not resumed.torn
        if i:
            decoded += len(decoder.feed(stream[begin : starts[i]]))
    decoded += len(decoder.feed(stream[starts[-2] :]))
    assert decoded == len(decode(stream)[0])


def some_cuts(stream: bytes) -> int:
    return 1 if len(stream) < 5000 else len(stream) // 300


def test_two_reads_that_make_up_the_whole_stream_give_the_same_events(stream: bytes) -> None:
    """The test above without its shortcut, at every byte of a stream below 5 kB, at 300 or so of a long one."""
    uncut = decode(stream)
    for cut in range(0, len(stream) + 1, some_cuts(stream)):
        assert decode(stream[:cut], stream[cut:]) == uncut, cut


# `event: error` was read, its data was not.
ANNOUNCED_ERROR = StreamEvent(error="error event", recognised=True)


def test_a_stream_that_stops_at_any_byte_never_shows_an_event_that_is_not_in_it(stream: bytes) -> None:
    """What a reset leaves: whole events, then either none or one that is whole but for its blank line."""
    events, _ = decode(stream)
    for cut in range(0, len(stream), some_cuts(stream)):
        cut_events, torn = decode(stream[:cut])
        whole = [event for event in cut_events if event != ANNOUNCED_ERROR]
        assert whole == events[: len(whole)], cut
        if len(whole) < len(cut_events):
            assert torn and cut_events[-1] == ANNOUNCED_ERROR and events[len(whole)].error, cut
        if torn:
            assert len(whole) < len(events), cut
