"""The browser's modules in a real Chromium: the decoder and the record against the Python ones, which are tested by
themselves, and the stream that a page gets against the one that it would have got.
"""

import base64
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given, settings

from exporter.control_plane import ControlPlane
from sloscope.demo.processes import Stage
from sloscope.sse import StreamDecoder, StreamEvent, parse_body
from sloscope.stream_record import StreamRecord
from tests.core.test_one_stream_three_observers import Exchange, Piece, exchanges, sent
from tests.end_to_end.browser import open_chromium, page, serving
from tests.end_to_end.support import need
from tests.exporter.test_receipts import with_app

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
ROOT = Path(__file__).parent.parent.parent
MAX_STREAM = 2000  # bytes; each is cut at every place

# Runs the decoder's own tests and prints the bytes that they feed.
RECORDING = """
import base64, json, sys
import pytest
from sloscope import sse

fed, bodies = {}, []
init, feed, parse_body = sse.StreamDecoder.__init__, sse.StreamDecoder.feed, sse.parse_body

def begin(self, *args, **options):
    init(self, *args, **options)
    fed[id(self)] = (self, options.get("max_event_bytes", 8 << 20), [])

def take(self, data):
    fed[id(self)][2].append(bytes(data))
    return feed(self, data)

def parse(data, *loads):
    bodies.append(data)
    return parse_body(data, *loads)

sse.StreamDecoder.__init__, sse.StreamDecoder.feed, sse.parse_body = begin, take, parse
quiet = "not cost and not memory and not beyond"
code = pytest.main(["-q", "-p", "no:cacheprovider", "-n0", "--hypothesis-seed=0", "-k", quiet,
                    "tests/core/test_sse.py", "tests/core/test_sse_framing.py"])
text = lambda data: base64.b64encode(data).decode()
streams = {(bound, b"".join(pieces)) for _, bound, pieces in fed.values()}
with open(sys.argv[1], "w") as out:
    json.dump({"streams": [[bound, text(data)] for bound, data in sorted(streams)],
               "bodies": sorted(set(map(text, bodies)))}, out)
sys.exit(code)
"""

CHECK = """
import { StreamDecoder, parseBody } from "/sloscope/sse.js";
import { Answer } from "/sloscope/answer.js";

const bytesOf = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
const { streams, bodies, exchanges } = await (await fetch("/cases.json")).json();
const wrong = [];
let cuts = 0;

const same = (what, found, expected) => {
  cuts += 1;
  const text = JSON.stringify(found);
  if (text !== JSON.stringify(expected) && wrong.length < 20) wrong.push({ what, found: text, expected });
};

function decoded(bound, reads) {
  const decoder = new StreamDecoder(bound);
  const events = reads.flatMap((read) => decoder.feed(read));
  return [...events, ...decoder.finish(), decoder.oversized, decoder.torn];
}

for (const { bound, data, expected } of streams) {
  const bytes = bytesOf(data);
  same(`${data} by bytes`, decoded(bound, Array.from(bytes, (byte) => Uint8Array.of(byte))), expected);
  for (let cut = 0; cut <= bytes.length; cut++) {
    same(`${data} cut at ${cut}`, decoded(bound, [bytes.subarray(0, cut), bytes.subarray(cut)]), expected);
  }
}
for (const { data, expected } of bodies) same(`body ${data}`, parseBody(bytesOf(data)), expected);
for (const each of exchanges) {
  const answer = new Answer(each.streaming, each.n_choices);
  answer.response(each.status, each.content_type);
  for (const [stamp, data] of each.reads) answer.receive(stamp, bytesOf(data));
  answer.finish(each.is_complete);
  const [outcome, reason] = answer.classify(each.transport, each.left);
  const found = { outcome, reason, end_ns: answer.endNs(each.end_ns), bytes: answer.bytes, ...answer.fields() };
  const sorted = Object.fromEntries(Object.entries(found).filter(([, value]) => value !== undefined).sort());
  same(`exchange ${JSON.stringify(each)}`, sorted, each.expected);
}
tell({ streams: streams.length, bodies: bodies.length, exchanges: exchanges.length, cuts, wrong });
"""

# Every way that a body may come and be read, with and without us.
PASSING = """
import { receiptFetch, stats } from "/sloscope/sloscope.js";

const event = 'data: {"choices":[{"index":0,"text":"é"}]}\\n\\n';
const done = "data: [DONE]\\n\\n";
const cut = (text, size) => {
  const bytes = new TextEncoder().encode(text), pieces = [];
  for (let at = 0; at < bytes.length; at += size) pieces.push(bytes.slice(at, at + size));
  return pieces;
};

// `ahead`: all of it waits when the first read comes. `late`: the end comes a while after the last piece.
function body({ type, size, ending, ahead, late }) {
  const pieces = cut(event.repeat(5) + (ending === "whole" ? done : ""), size);
  let isLeft = false;
  const cancel = () => void (isLeft = true);
  const end = (controller) => {
    if (isLeft) return;
    if (ending === "broken") controller.error(new TypeError("network error"));
    else controller.close();
    if (ending !== "broken") controller.byobRequest?.respond(0);
  };
  const start = (controller) => {
    pieces.splice(0).forEach((piece) => controller.enqueue(piece));
    if (late) setTimeout(() => end(controller), 20);
    else end(controller);
  };
  const pull = (controller) => (pieces.length > 0 ? controller.enqueue(pieces.shift()) : end(controller));
  return new ReadableStream({ type, cancel, ...(ahead ? { start } : { pull }) }, { highWaterMark: 0 });
}

async function all(reader, view) {
  const read = [];
  for (;;) {
    const { done, value } = await reader.read(...view());
    if (done) return read;
    read.push([...value]);
  }
}

const ways = {
  text: (response) => response.text(),
  bytes: async (response) => [...new Uint8Array(await response.arrayBuffer())],
  reader: (response) => all(response.body.getReader(), () => []),
  // How much one read brings is the stream's choice here, and what they bring together is not.
  byob: async (response) => (await all(response.body.getReader({ mode: "byob" }), () => [new Uint8Array(7)])).flat(),
  iterated: async (response) => {
    const read = [];
    for await (const piece of response.body) read.push([...piece]);
    return read;
  },
  piped: async (response) => {
    const read = [];
    await response.body.pipeTo(new WritableStream({ write: (piece) => void read.push([...piece]) }));
    return read;
  },
  cloned: async (response) => Promise.all([response.clone().text(), response.text()]),
  slow: async (response) => {
    const reader = response.body.getReader();
    const first = await reader.read();
    await new Promise((resolve) => setTimeout(resolve, 30));
    return [[...first.value], ...(await all(reader, () => []))];
  },
  left: async (response) => {
    const reader = response.body.getReader();
    const first = await reader.read();
    await reader.cancel("disconnect");
    return [...first.value];
  },
};

const receipts = [];
let next = null;
const inner = async (input, init) => {
  if (!String(input).endsWith("/v1/receipts")) {
    return new Response(next, { headers: { "content-type": "text/event-stream" } });
  }
  const posted = JSON.parse(init.body).receipts;
  receipts.push(...posted);
  return Response.json({ accepted: posted.length, rejected: [] });
};
const watched = receiptFetch({ receipts: "http://control", fetch: inner });
const request = { method: "POST", body: JSON.stringify({ stream: true }) };

async function outcomeOf(how, shape, way) {
  next = body(shape);
  const response = await how("/v1/completions", request);
  try {
    const tooLong = new Promise((_, refuse) => setTimeout(() => refuse(new Error("it hangs")), 3000));
    return { read: await Promise.race([ways[way](response), tooLong]) };
  } catch (error) {
    return { error: `${error.name}: ${error.message}` };
  }
}

const wrong = [];
const names = {};
for (const type of ["bytes", undefined])
  for (const size of [1, 30, 10_000])
    for (const ending of ["whole", "cut", "broken"])
      for (const ahead of [true, false])
        for (const late of ahead ? [true, false] : [false])
          for (const way of Object.keys(ways)) {
            if (way === "byob" && type === undefined) continue; // no such reader of its own
            const shape = { type, size, ending, ahead, late };
            const [own, ours] = [await outcomeOf(inner, shape, way), await outcomeOf(watched, shape, way)];
            if (JSON.stringify(own) !== JSON.stringify(ours)) wrong.push({ way, shape, own, ours });
            names[`${ending} ${way}`] = (names[`${ending} ${way}`] ?? 0) + 1;
          }
const isOpen = () => stats().reported < stats().requests;
for (let turns = 200; turns > 0 && isOpen(); turns--) await new Promise((resolve) => setTimeout(resolve, 50));
tell({ wrong: wrong.slice(0, 5), stats: stats(), receipts });
"""


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def as_told(event: StreamEvent) -> dict[str, Any]:
    """In the order and the words of the module."""
    usage = None if event.usage is None else {"prompt": event.usage[0], "completion": event.usage[1]}
    return {
        "outputs": event.outputs, "finishes": event.finishes, "usage": usage, "error": event.error,
        "done": event.done, "model": event.model, "malformed": event.malformed, "recognised": event.recognised,
        "rawUsageOnly": event.raw_usage_only,
    }  # fmt: skip


def stream_case(bound: int, data: bytes) -> dict[str, Any]:
    decoder = StreamDecoder(orjson.loads, max_event_bytes=bound)
    events = decoder.feed(data) + decoder.finish()
    expected = [*map(as_told, events), decoder.oversized, decoder.torn]
    return {"bound": bound, "data": b64(data), "expected": expected}


def recorded_cases(tmp_path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Streams and bodies of the decoder's own tests, with what the Python decoder makes of them."""
    target = tmp_path / "fed.json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    run = subprocess.run(
        [sys.executable, "-c", RECORDING, str(target)], cwd=ROOT, capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    fed = json.loads(target.read_text())
    streams = [(bound, base64.b64decode(data)) for bound, data in fed["streams"]]
    bodies = [base64.b64decode(data) for data in fed["bodies"]]
    # A count that is written 5.0 is none in Python; JavaScript has one kind of number.
    return (
        [stream_case(bound, data) for bound, data in streams if len(data) <= MAX_STREAM and b".0" not in data],
        [
            {"data": b64(data), "expected": as_told(parse_body(data, orjson.loads))}
            for data in bodies
            if b".0" not in data
        ],
    )


def exchange_case(each: Exchange) -> dict[str, Any]:
    record = StreamRecord(orjson.loads, 8 << 20, each.streaming, each.n_choices)
    record.response(each.status, each.content_type, "")
    for stamp, data in each.reads:
        record.receive(stamp, data)
    record.finish(each.complete)
    ended = record.classify(each.transport, each.left, 1)
    said = record.ended()
    tokens, types, choices = record.tokens, record.type.tolist(), record.choice.tolist()
    expected = {
        **{name: said[name] for name in ("finish_reason", "prompt_tokens", "output_tokens", "token_source")},
        "bytes": said["bytes"],
        "http_status": said["http_status"],
        "outcome": ended.outcome,
        "reason": ended.reason,
        "end_ns": record.end_ns(each.end_ns),
        "t_ns": record.t_ns.tolist() or None,
        "choice": choices if any(choices) else None,
        "type": types if any(types) else None,
        "tokens": tokens if any(count is not None for count in tokens) else None,
        "streaming": each.streaming,
        "n_choices": each.n_choices,
    }
    return {
        "streaming": each.streaming, "n_choices": each.n_choices, "status": each.status,
        "content_type": each.content_type, "reads": [(stamp, b64(data)) for stamp, data in each.reads],
        "is_complete": each.complete, "transport": each.transport, "left": each.left, "end_ns": each.end_ns,
        "expected": {name: value for name, value in sorted(expected.items()) if value is not None},
    }  # fmt: skip


def counted(*counts: int, final: int | None = None, finish: str | None = "length") -> Exchange:
    """One choice by continuous usage: tokens so far with each output event, an event a millisecond."""
    bodies: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": {"content": "x"}}], "usage": {"completion_tokens": count}}
        for count in counts
    ]
    if finish is not None:
        bodies.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    if final is not None:
        bodies.append({"choices": [], "usage": {"completion_tokens": final}})
    pieces = [Piece(orjson.dumps(body)) for body in bodies]
    parts = sent(pieces, b"\n")
    reads = [(position * 1_000_000, part) for position, part in enumerate(parts, start=1)]
    wire = b"".join(parts)
    return Exchange(0, 9_000_000, 1, True, 200, "text/event-stream", "", pieces, b"\n", wire, reads, set(), "eof", "")


def odd_counts() -> list[dict[str, Any]]:
    """What random streams do not hold: an event of no token, a count that goes back, a request of no token."""
    each = [
        counted(2, 2, 5),
        counted(0, 3),
        counted(0, 0),
        counted(0, final=0),
        counted(final=0),
        counted(2, 2, 5, finish=None),
        counted(0, finish=None),
        counted(4, 3, 6),
        counted(3, 0, 4, final=4),
    ]
    return [exchange_case(exchange) for exchange in each]


def random_exchanges() -> list[dict[str, Any]]:
    """Of the test that holds client and sidecar to one another; a browser undoes compression itself."""
    found: list[dict[str, Any]] = []

    @settings(max_examples=600, derandomize=True, database=None, deadline=None)
    @given(exchanges())
    def collect(each: Exchange) -> None:
        # A browser knows no deadline of a server's: its reads end or break.
        if not each.coding and each.transport != "timeout":
            found.append(exchange_case(each))

    collect()
    return found


def test_a_browser_reads_every_stream_cut_anywhere_as_python_does(tmp_path: Path) -> None:
    need("chromium")
    streams, bodies = recorded_cases(tmp_path)
    cases = {"streams": streams, "bodies": bodies, "exchanges": [*random_exchanges(), *odd_counts()]}
    assert len(streams) > 500 and len(bodies) > 100 and len(cases["exchanges"]) > 100
    pages = {"/check.html": page(CHECK), "/cases.json": json.dumps(cases)}
    with serving(pages) as served, Stage(tmp_path) as stage:
        open_chromium(stage, tmp_path / "profile", f"{served.url}/check.html")
        result = served.result(180)
    print({name: value for name, value in result.items() if name != "wrong"})
    assert result["wrong"] == []
    assert (result["streams"], result["bodies"]) == (len(streams), len(bodies))


def test_a_page_gets_every_byte_and_every_error_that_it_would_have_got(tmp_path: Path) -> None:
    need("chromium")
    with serving({"/passing.html": page(PASSING)}) as served, Stage(tmp_path) as stage:
        open_chromium(stage, tmp_path / "profile", f"{served.url}/passing.html")
        result = served.result(120)
    assert result["wrong"] == []
    told, receipts = result["stats"], result["receipts"]
    # 3 sizes, 3 endings, 3 ways to come; 9 ways to read a stream of bytes, 8 to read another
    assert told["requests"] == told["reported"] == len(receipts) == 3 * 3 * 3 * (9 + 8), told
    assert told["observerErrors"] == 0
    ended = Counter((receipt["outcome"], receipt["reason"]) for receipt in receipts)
    assert ended.keys() <= {
        ("completed", ""), ("failed", "truncated"), ("failed", "upstream_reset"), ("failed", "empty_stream"),
        ("cancelled", "disconnect"),
    }  # fmt: skip
    assert ended["completed", ""] >= 3 * 3 * (8 + 7) and ended["cancelled", "disconnect"] > 0

    async def test(client: httpx.AsyncClient, _: ControlPlane) -> None:
        answer = await client.post("/v1/receipts", json={"receipts": receipts})
        assert answer.json() == {"accepted": len(receipts), "rejected": []}

    with_app(tmp_path, test)
