"""Streams recorded from real servers, replayed to the real sidecar in random pieces: what goes out is what came in, and
what is recorded is what was written down by hand of each stream (sse_expected) and by its recorder (.meta.json).
"""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import zlib
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from sloscope.records import OUTPUT_TYPES
from tests.exporter.harness import Bench, Seen, bench, request, run
from tests.field.test_sse_streams import EXPECTED, FORMATS, STREAMS, recorded_stream

SEED = 20261130
CODINGS = {"identity": lambda body: body, "gzip": gzip.compress, "deflate": zlib.compress}
OTHER_APIS = ("anthropic_sonnet4_simple", "openai_responses_gpt4o", "xai_grok41")  # messages, responses
# Their recordings name no URL, or one whose path is of no API that is known.
PATHS = {"writer_tool_noDONE": "/v1/chat/completions"}


def meta_of(folder: Path, name: str) -> dict[str, Any]:
    path = folder / "sse" / f"{name}.meta.json"
    return json.loads(path.read_text()) if path.exists() else {}


def path_of(name: str, meta: dict[str, Any]) -> str:
    url = urlsplit(meta.get("url", "http://a/v1/chat/completions"))
    return PATHS.get(name) or (url.path + f"?{url.query}" if url.query else url.path)


def stream_of(folder: Path, name: str) -> bytes:
    (path,) = (found for suffix in FORMATS if (found := folder / "sse" / f"{name}.{suffix}").exists())
    return recorded_stream(path)


def random_chunks(body: bytes, dice: random.Random) -> bytes:
    raw = b""
    while body:
        size = dice.choice((1, dice.randint(1, 40), dice.randint(1, 4000)))
        piece, body = body[:size], body[size:]
        raw += b"%x\r\n%b\r\n" % (len(piece), piece)
    return raw + b"0\r\n\r\n"


def random_reads(raw: bytes, dice: random.Random) -> Iterator[bytes]:
    """At most about sixty: each is a turn of the loop."""
    cuts = sorted(dice.sample(range(1, len(raw)), min(len(raw) - 1, dice.randint(0, 60))))
    for start, stop in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        yield raw[start:stop]


def outcome_of(expected: dict[str, Any]) -> tuple[str, str]:
    """By the words of the outcomes; every one of these streams has output."""
    if expected["errors"]:
        return "failed", "in_band_error"
    finished = expected["choices"] and all(choice["finishes"] for choice in expected["choices"].values())
    return ("completed", "") if finished or expected["done"] else ("failed", "truncated")


@pytest.mark.parametrize("coding", CODINGS)
def test_a_recorded_stream_is_forwarded_byte_for_byte_and_understood(
    tmp_path: Path, field_data: Path, coding: str
) -> None:
    dice = random.Random(f"{SEED} {coding}")
    raw_of = {
        name: random_chunks(CODINGS[coding](stream_of(field_data, name)), dice)  # type: ignore[no-untyped-call]
        for name in STREAMS
    }
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncontent-encoding: %b\r\n"
    head = head % coding.encode() + b"transfer-encoding: chunked\r\n\r\n"

    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        for piece in random_reads(head + raw_of[seen.header("recording") or ""], dice):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            ids = {name: await replay(b, name) for name in STREAMS}
            observed = [name for name in STREAMS if name not in OTHER_APIS]
            ends = {end["request_id"]: end for end in await b.ends(len(observed))}
            chunks: dict[str, list[dict[str, Any]]] = {}
            for record in b.records("chunks"):
                chunks.setdefault(record["request_id"], []).append(record)
            for name in observed:
                check(name, ends[ids[name]], chunks.get(ids[name], []))
            assert b.total("sloscope_sidecar_passthrough_total") == len(OTHER_APIS)
            assert b.check_identity() == len(observed)
            problems = b.total("sloscope_parse_problems_total")
            assert problems == 0

    async def replay(b: Bench, name: str) -> str:
        meta = meta_of(field_data, name)
        asked = json.dumps(meta.get("request", {}) | {"stream": True}).encode()
        client = await b.connect()
        await client.send(request(asked, f"recording: {name}", path=path_of(name, meta)))
        answer = await client.response()
        await client.close()
        assert answer.body == raw_of[name], (name, SEED)
        assert b.upstream.seen[-1].body == asked
        return answer.header("x-sloscope-request-id") or ""

    def check(name: str, end: dict[str, Any], batches: list[dict[str, Any]]) -> None:
        expected, meta = json.loads((EXPECTED / f"{name}.json").read_text()), meta_of(field_data, name)
        receipts = [
            (choice, OUTPUT_TYPES[kind])
            for batch in batches
            for choice, kind in zip(batch["choice"], batch["type"], strict=True)
        ]
        for index, choice in expected["choices"].items():
            kinds = [kind for number, kind in receipts if number == int(index)]
            assert [[kind, len(list(run))] for kind, run in groupby(kinds)] == choice["outputs"], (name, index)
        assert len(receipts) == sum(count for each in expected["choices"].values() for _, count in each["outputs"])
        stamps = [stamp for batch in batches for stamp in batch["t_ns"]]
        forwarded = [stamp for batch in batches for stamp in batch["forwarded_ns"]]
        assert stamps == sorted(stamps) and all(a <= b for a, b in zip(stamps, forwarded, strict=True))
        finishes = [each["finishes"][-1] if each["finishes"] else None for each in expected["choices"].values()]
        assert end.get("finish_reason") == (finishes if any(finishes) else None), name
        assert (end["outcome"], end["reason"]) == outcome_of(expected), name
        if expected["usage"]:
            assert [end["prompt_tokens"], end["output_tokens"]] == expected["usage"][-1], name
            assert end["token_source"] in ("usage", "continuous_usage"), name
        else:
            assert (end["output_tokens"], end["token_source"]) == (len(receipts), "assumed_one"), name
        for quirk in meta.get("quirks", ()):
            if quirk.startswith("finish:"):
                assert quirk.removeprefix("finish:") in end["finish_reason"], name
            if quirk == "n>1":
                assert len(end["finish_reason"]) == meta["request"]["n"], name
            if quirk in ("error-in-chunk", "error-event"):
                assert end["reason"] == "in_band_error", name

    run(test(), timeout_s=60)
