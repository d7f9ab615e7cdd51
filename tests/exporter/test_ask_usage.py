"""Usage that the sidecar asks for: the body otherwise as it was, and nothing extra in the answer."""

from __future__ import annotations

import asyncio
import itertools
import json
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.ask_usage import UsageFilter, asking
from tests.exporter.harness import (
    ASK,
    CHAT,
    DONE,
    STREAM_HEAD,
    Script,
    Seen,
    answering,
    bench,
    chunked,
    event,
    finish,
    request,
    run,
    sse,
    usage,
)

OPTION = b'"stream_options":{"include_usage":true},'
OUTPUT = event("a") + event("b") + finish()
ANSWER = OUTPUT + usage(2, 5) + DONE


@pytest.mark.parametrize(
    ("body", "changed"),
    [
        (b'{"stream":true,"x":"\xc3\xa9\\u00e9"}', b"{" + OPTION + b'"stream":true,"x":"\xc3\xa9\\u00e9"}'),
        (b'\r\n {  "model": 1.50e3,\t"stream" : true }', b"\r\n {" + OPTION + b'  "model": 1.50e3,\t"stream" : true }'),
    ],
)
def test_the_option_goes_in_front_and_every_other_byte_stays(body: bytes, changed: bytes) -> None:
    asked = json.loads(body)
    assert asking(body, asked) == changed
    assert json.loads(changed) == {**asked, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    "body",
    [
        b'{"stream":false}',
        b"{}",
        b'{"stream":1}',
        b'{"stream":true,"stream_options":{"include_usage":true}}',
        b'{"stream":true,"stream_options":{"include_usage":false}}',
        b'{"stream":true,"stream_options":null}',
    ],
)
def test_who_does_not_stream_or_names_options_is_left_alone(body: bytes) -> None:
    assert asking(body, json.loads(body)) is None


# --- the filter


EVENTS = [
    event("a"),
    finish(),
    usage(3),
    sse({"choices": [], "usage": None}),
    sse({"choices": [], "prompt_filter_results": [{"usage": 1}]}),
    sse({"choices": [{"index": 0, "delta": {"content": '"usage"'}}], "usage": {"completion_tokens": 1}}),
    b': a comment with "usage"\n\n',
    b"event: message\n" + usage(4),
    event("x" * 9000),
    sse({"error": {"type": "usage"}, "usage": {"completion_tokens": 1}}),
    DONE,
]
STRIPPED = {EVENTS[2], EVENTS[7]}
LINE_ENDS = [b"\n", b"\r\n", b"\r"]


@given(
    chosen=st.lists(st.sampled_from(EVENTS), max_size=8),
    line_end=st.sampled_from(LINE_ENDS),
    cuts=st.lists(st.integers(0, 20_000), max_size=12),
)
def test_only_events_of_mere_usage_are_missing_however_the_stream_is_cut(
    chosen: list[bytes], line_end: bytes, cuts: list[int]
) -> None:
    data = b"".join(chosen).replace(b"\n", line_end)
    expected = b"".join(each for each in chosen if each not in STRIPPED).replace(b"\n", line_end)
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    found = UsageFilter()
    out = b"".join(found.feed(data[a:z]) for a, z in itertools.pairwise(places)) + found.finish()
    assert out == expected


def test_an_event_is_passed_on_with_the_read_that_completes_it() -> None:
    found = UsageFilter()
    assert found.feed(event("a") + event("b")[:20]) == event("a")
    assert found.feed(event("b")[20:]) == event("b")
    assert found.feed(usage(2)[:-1]) == b""
    assert found.feed(b"\n" + DONE) == DONE


def test_a_long_event_is_not_kept_and_a_torn_end_is_not_lost() -> None:
    found = UsageFilter()
    long = event("x" * 20_000)
    assert len(found.feed(long[:15_000])) == 15_000
    assert found.feed(long[15_000:]) == long[15_000:]
    assert found.feed(b'data: {"choi') == b"" and found.finish() == b'data: {"choi'
    unclosed = UsageFilter()
    assert unclosed.feed(usage(2).rstrip()) == b"" and unclosed.finish() == b""


# --- on sockets


def sized(body: bytes) -> Script:
    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )

    return script


async def until_close(_: Seen, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + ANSWER)
    await writer.drain()
    writer.close()


@pytest.mark.parametrize("script", [answering(ANSWER[:70], ANSWER[70:]), sized(ANSWER)])
def test_the_sidecar_counts_by_usage_and_the_client_sees_none(tmp_path: Path, script: Script) -> None:
    async def test() -> None:
        async with bench(tmp_path, script, ask_usage=True) as b:
            client = await b.connect()
            for _ in range(2):  # the connection goes on
                await client.send(request())
                answer = await client.response()
                assert dechunked(answer.body) == OUTPUT + DONE
                assert answer.header("content-length") is None
            assert b.upstream.seen[0].body == b"{" + OPTION + ASK[1:]
            assert b.upstream.seen[0].header("content-length") == str(len(ASK) + len(OPTION))
            for end in await b.ends(2):
                assert (end["token_source"], end["output_tokens"], end["prompt_tokens"]) == ("usage", 2, 5)

    run(test())


def test_a_stream_that_the_end_of_the_connection_ends_is_stripped_too(tmp_path: Path) -> None:
    async def test() -> None:
        async with bench(tmp_path, until_close, ask_usage=True) as b:
            assert (await b.ask()).body == OUTPUT + DONE
            assert await b.end() == ("completed", "")

    run(test())


def test_a_client_of_http10_gets_the_stripped_payload(tmp_path: Path) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(ANSWER), ask_usage=True) as b:
            client = await b.connect()
            await client.send(b"POST %b HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (CHAT.encode(), len(ASK), ASK))
            assert (await client.response()).body == OUTPUT + DONE

    run(test())


def test_a_request_in_chunks_is_asked_in_chunks_unless_it_has_trailers(tmp_path: Path) -> None:
    head = b"POST %b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" % CHAT.encode()
    raw, with_trailer = chunked(ASK[:4], ASK[4:]), chunked(ASK)[:-2] + b"x-sum: 0\r\n\r\n"

    async def test() -> None:
        async with bench(tmp_path, answering(ANSWER), ask_usage=True) as b:
            client = await b.connect()
            await client.send(head + raw)
            assert dechunked((await client.response()).body) == OUTPUT + DONE
            assert b.upstream.seen[0].body == chunked(b"{" + OPTION + ASK[1:])
            assert b.upstream.seen[0].header("content-length") is None
            await client.send(head + with_trailer)
            assert dechunked((await client.response()).body) == ANSWER
            assert b.upstream.seen[1].body == with_trailer

    run(test())


PLAIN = b'{"model":"m"}'
OWN = b'{"stream":true,"stream_options":{"include_usage":true}}'


@pytest.mark.parametrize("body", [PLAIN, OWN, b"\x1f\x8b" + zlib.compress(ASK), b"[1]"])
def test_what_is_not_asked_for_passes_untouched_both_ways(tmp_path: Path, body: bytes) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(ANSWER), ask_usage=True) as b:
            assert (await b.ask(body)).body == chunked(ANSWER)
            assert b.upstream.seen[0].body == body

    run(test())


@pytest.mark.parametrize(
    "header",
    [
        "content-digest: sha-256=:abc=:",
        "Digest: SHA-256=abc=",
        "content-md5: abc==",
        'signature-input: sig=("content-digest")',
        "signature: sig=:abc=:",
        "content-encoding: gzip",
    ],
)
def test_a_body_that_a_header_vouches_for_stays_as_it_was_signed(tmp_path: Path, header: str) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(ANSWER), ask_usage=True) as b:
            assert (await b.ask(ASK, header)).body == chunked(ANSWER)
            assert b.upstream.seen[0].body == ASK
            assert b.upstream.seen[0].header("content-length") == str(len(ASK))

    run(test())


def test_without_the_option_nobody_is_asked(tmp_path: Path) -> None:
    async def test() -> None:
        async with bench(tmp_path, answering(ANSWER)) as b:
            assert (await b.ask()).body == chunked(ANSWER)
            assert b.upstream.seen[0].body == ASK

    run(test())


def test_a_compressed_stream_passes_with_its_usage(tmp_path: Path) -> None:
    packed = zlib.compress(ANSWER)

    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD.replace(b"\r\n\r\n", b"\r\ncontent-encoding: deflate\r\n\r\n") + chunked(packed))

    async def test() -> None:
        async with bench(tmp_path, script, ask_usage=True) as b:
            assert (await b.ask()).body == chunked(packed)
            (end,) = await b.ends()
            assert end["output_tokens"] == 2

    run(test())


def test_a_stream_that_breaks_off_loses_nothing_that_had_come(tmp_path: Path) -> None:
    async def script(_: Seen, writer: asyncio.StreamWriter) -> None:
        begun = event("a") + event("b")[:30]
        writer.write(STREAM_HEAD + b"%x\r\n%b\r\n" % (len(begun), begun))
        await writer.drain()
        writer.close()

    async def test() -> None:
        async with bench(tmp_path, script, ask_usage=True) as b:
            client = await b.connect()
            await client.send(request())
            got = (await client.to_end()).partition(b"\r\n\r\n")[2]
            assert dechunked(got) == event("a") + event("b")[:30] and not got.endswith(b"0\r\n\r\n")

    run(test())


def dechunked(raw: bytes) -> bytes:
    payload = b""
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        payload += raw[: int(size, 16)]
        raw = raw[int(size, 16) + 2 :]
    return payload
