"""Compressed streams: forwarded as they came, understood as far as they came."""

from __future__ import annotations

import asyncio
import gzip
import random
import zlib
from pathlib import Path

import pytest

from sloscope.sse import StreamDecoder
from tests.exporter.harness import (
    DONE,
    STREAM_HEAD,
    RawClient,
    Seen,
    bench,
    chunked,
    event,
    finish,
    request,
    run,
    usage,
)

SEED = 7
EVENTS = [event(str(number) * 9) for number in range(12)] + [finish(), usage(12), DONE]
WINDOW = {"gzip": 31, "deflate": 15}


def compressed(coding: str) -> bytes:
    """Flushed after each event, as a server that streams has to."""
    packer = zlib.compressobj(wbits=WINDOW[coding])
    return b"".join(packer.compress(each) + packer.flush(zlib.Z_SYNC_FLUSH) for each in EVENTS) + packer.flush()


def head_for(coding: str) -> bytes:
    return STREAM_HEAD.replace(b"\r\n\r\n", f"\r\nContent-Encoding: {coding}\r\n\r\n".encode())


def readable(part: bytes, coding: str) -> tuple[int, tuple[str, str]]:
    """Output events in what can be read of a part of the body, and the outcome of a stream that stops there."""
    decoder = StreamDecoder()
    events = decoder.feed(zlib.decompressobj(WINDOW[coding]).decompress(part)) + decoder.finish()
    outputs = sum(len(each.outputs) for each in events)
    if any(each.done or each.finishes for each in events):
        return outputs, ("completed", "")
    return outputs, ("failed", "truncated" if outputs else "empty_stream")


@pytest.mark.parametrize("ended", [True, False], ids=["HTTP says whole", "cut off"])
@pytest.mark.parametrize("coding", WINDOW)
def test_a_compressed_stream_that_stops_at_any_byte_is_understood_up_to_there(
    tmp_path: Path, coding: str, ended: bool
) -> None:
    whole, dice = compressed(coding), random.Random(SEED)
    # Every byte of header and trailer, and some between.
    cuts = [*range(1, 14), *dice.sample(range(14, len(whole) - 14), 30), *range(len(whole) - 14, len(whole) + 1)]

    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        part = whole[: int(seen.header("cut") or 0)]
        writer.write(head_for(coding))
        while part:
            size = dice.randint(1, 60)
            piece, part = part[:size], part[size:]
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
        writer.write(b"0\r\n\r\n" if ended else b"")
        writer.close()

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            ids = {}
            for cut in cuts:
                client = await b.connect()
                await client.send(request(b'{"model":"m","stream":true}', f"cut: {cut}", "connection: close"))
                ids[await payload_of(client, whole[:cut], ended)] = cut
            ends = await b.ends(len(cuts))
            received = dict.fromkeys(ids, 0)
            for record in b.records("chunks"):
                received[record["request_id"]] += len(record["t_ns"])
            for end in ends:
                cut = ids[end["request_id"]]
                said = received[end["request_id"]], (end["outcome"], end["reason"])
                assert said == readable(whole[:cut], coding), (coding, cut, SEED)
            assert b.total("sloscope_parse_problems_total") == 0

    async def payload_of(client: RawClient, expected: bytes, ended: bool) -> str:
        head = await client.reader.readuntil(b"\r\n\r\n")
        raw = await client.to_end()
        payload = b""
        while raw and not raw.startswith(b"0\r\n"):
            size, _, rest = raw.partition(b"\r\n")
            payload, raw = payload + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        assert payload == expected and (raw == b"0\r\n\r\n") == ended
        (line,) = (line for line in head.split(b"\r\n") if line.startswith(b"x-sloscope-request-id: "))
        return line.partition(b": ")[2].decode()

    run(test(), timeout_s=60)


@pytest.mark.parametrize("coding", WINDOW)
def test_an_event_of_a_compressed_stream_is_a_receipt_when_it_can_be_read(tmp_path: Path, coding: str) -> None:
    release = asyncio.Event()

    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        packer = zlib.compressobj(wbits=WINDOW[coding])
        first = packer.compress(event()) + packer.flush(zlib.Z_SYNC_FLUSH)
        rest = packer.compress(event() + finish() + DONE) + packer.flush()
        writer.write(head_for(coding) + b"%x\r\n%b\r\n" % (len(first), first))
        await release.wait()
        writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(rest), rest))

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            asking = asyncio.create_task(b.ask())
            (observation,) = await b.until(lambda: list(b.plane.watch.active.values()))

            def events() -> int:
                observation.understand()
                return observation.events

            await b.until(lambda: events() == 1)
            release.set()
            await asking
            assert await b.end() == ("completed", "")
            assert b.total("sloscope_sidecar_ttft_seconds_count") == 1
            assert b.total("sloscope_sidecar_icl_seconds_count") == 1

    run(test())


def test_a_stream_of_one_gzip_member_for_each_event_is_understood_to_its_end(tmp_path: Path) -> None:
    members = [gzip.compress(each) for each in EVENTS]

    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(head_for("gzip") + chunked(*members))

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            assert (await b.ask()).body == chunked(*members)
            (ended,) = await b.ends()
            assert (ended["outcome"], ended["output_tokens"], ended["token_source"]) == ("completed", 12, "usage")
            assert sum(len(each["t_ns"]) for each in b.records("chunks")) == 12
            assert b.total("sloscope_parse_problems_total") == 0

    run(test())


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, br"])
def test_a_coding_that_cannot_be_read_passes_untouched_and_is_said_to_be_unread(tmp_path: Path, coding: str) -> None:
    body = b"1f\r\n" + bytes(range(31)) + b"\r\n0\r\n\r\n"

    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(head_for(coding) + body)

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            answer = await b.ask()
            assert answer.body == body and answer.header("content-encoding") == coding
            (end,) = await b.ends()
            assert end["outcome"] == "completed" and "output_tokens" not in end
            assert b.total("sloscope_parse_problems_total", problem="unknown_content_encoding") == 1
            assert b.total("sloscope_sidecar_ttft_seconds_count") == 0

    run(test())
