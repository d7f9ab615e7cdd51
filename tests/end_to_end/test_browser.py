"""A page in a real Chromium asks through a sidecar and reports its receipts: the three observers tell one story."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sloscope.demo.processes import Stage, ask
from tests.end_to_end.browser import open_chromium, page, serving
from tests.end_to_end.scrapes import scrape
from tests.end_to_end.support import Follower, free_port, need, start_nginx, start_server, start_sidecar
from tests.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
MS = 1_000_000
WHOLE = 5  # streams that are read to their end

ASKING = """
import { receiptFetch, stats } from "/sloscope/sloscope.js";
const { receipts, token, closed, api } = await (await fetch("/given.json")).json();
const watched = receiptFetch({ receipts, token, tenant: "page", labels: { app: "chat" } });
const story = { model: "builtin", prompt: "Once upon", max_tokens: 40, stream: true, temperature: 0 };
const asked = (body, more) => ({
  method: "POST", headers: { "content-type": "application/json" },
  body: JSON.stringify({ ...story, ...body }), ...more,
});
const chat = (body, more, how = watched) => how("/v1/completions", asked(body, more));
// Twenty seconds: whoever leaves it leaves it in the midst.
const slow = { "content-type": "application/json", "x-sloscope-fault": "slow=50ms" };
const long = (more) => chat({ max_tokens: 400 }, { headers: slow, ...more });
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const seen = {};
const note = (name, response, more) => {
  seen[name] = { id: response?.headers.get("x-sloscope-request-id"), status: response?.status, ...more };
};
const textOf = (body) => [...body.matchAll(/"text":"((?:[^"\\\\]|\\\\.)*)"/g)].map((found) => found[1]).join("");
const failure = (promise) => promise.then(() => null, (error) => error.name ?? error);
"""

TALKING = (
    ASKING
    + """
const plain = textOf(await (await chat({}, {}, fetch)).text());
await Promise.all([0, 1, 2, 3, 4].map(async (number) => {
  const response = await chat({});
  const { url, type, redirected } = response;
  const copy = number === 0 ? response.clone() : null;
  const text = await response.text();
  const isSame = textOf(text) === plain && (copy === null || (await copy.text()) === text);
  note(`whole ${number}`, response, { isSame, url, type, redirected });
}));

const body = await chat({ stream: false });
note("not streamed", body, { isSame: (await body.json()).choices[0].text.length > 0 });
const refused = await chat({ temperature: "hot" });
note("refused", refused, { text: await refused.text() });

const controller = new AbortController();
const aborted = await long({ signal: controller.signal });
const abortedReader = aborted.body.getReader();
await abortedReader.read();
controller.abort();
note("aborted", aborted, { failure: await failure(abortedReader.read()), closed: await failure(abortedReader.closed) });

const said = new AbortController();
const left = await long({ signal: said.signal });
const leftReader = left.body.getReader();
await leftReader.read();
said.abort("disconnect");
note("left", left, { failure: await failure(leftReader.read()) });

const late = await long({ signal: AbortSignal.timeout(600) });
const lateReader = late.body.getReader();
await lateReader.read();
await pause(700);
note("late", late, { failure: await failure(lateReader.read()) });

const enough = await long({});
for await (const _ of enough.body) break;
note("enough", enough);

// A reader that brings its own buffer, and holds off.
const held = await chat({});
const byob = held.body.getReader({ mode: "byob" });
let part = await byob.read(new Uint8Array(64));
await pause(300);
while (!part.done) part = await byob.read(new Uint8Array(4096));
note("held", held);

const busy = await chat({});
for (const until = performance.now() + 250; performance.now() < until; );
await busy.text();
note("busy", busy);

note("unreached", null, { failure: await failure(watched(closed, asked({}))) });
for (let turns = 200; turns > 0 && stats().reported < stats().requests; turns--) await pause(50);
await tell({ seen, stats: stats() });
"""
)

LEAVING = (
    ASKING
    + """
const response = await long({});
const reader = response.body.getReader();
for (let i = 0; i < 3; i++) await reader.read();
note("closed", response);
await tell({ seen });
if (opener) opener.postMessage("close me", "*");
else location.href = "/elsewhere.html";
"""
)

OPENING = """
const other = open("/leaving.html");
addEventListener("message", () => other.close());
"""


ELSEWHERE = (
    ASKING
    + """
const response = await watched(api, asked({}));
note("answered", response, { text: (await response.text()).length });
note("not there", await watched(`${api}?not=there`, asked({})));
for (let turns = 200; turns > 0 && stats().reported < stats().requests; turns--) await pause(50);
await tell({ seen, stats: stats() });
"""
)


def rows(events: Path) -> dict[str, dict[str, Any]]:
    """request id → its row, the observers side by side."""
    given = ("sql", "select * from requests", "--events", str(events), "--goodput", "ttft:5000", "--format", "json")
    return {row["request_id"]: row for row in json.loads(ask(*given))}


def client_labels(events: Path) -> dict[str, dict[str, Any]]:
    begun = (record for record in Follower(events).read() if record["kind"] == "begin")
    return {record["request_id"]: record["labels"] for record in begun if record["observer"] == "client"}


def nothing_is_open(events: Path) -> bool:
    """Every observer ended what it began."""
    kinds = Counter(record["kind"] for record in Follower(events).read())
    return kinds["begin"] == kinds["end"]


def ends(row: dict[str, Any]) -> tuple[str, str]:
    return row["client_outcome"], row["client_reason"]


def test_what_a_page_reports_joins_what_sidecar_and_engine_saw(tmp_path: Path) -> None:
    need("chromium")
    events, sidecar_port, control_port = tmp_path / "events", free_port(), free_port()
    scripts = {"talking": TALKING, "leaving": LEAVING, "opening": OPENING, "elsewhere": ""}
    pages = {f"/{name}.html": page(script) for name, script in scripts.items()}
    with serving(pages) as served, Stage(tmp_path) as stage:
        # One origin for the pages and for what they ask; some post their receipts there, too.
        unbuffered = f"proxy_pass http://127.0.0.1:{sidecar_port}; proxy_http_version 1.1; proxy_buffering off;"
        here = f"proxy_pass http://127.0.0.1:{control_port}; proxy_set_header Host $http_host;"
        api = f"}} location = /v1/receipts {{ {here} }} location /v1/ {{ {unbuffered}"
        site = start_nginx(stage, tmp_path / "nginx", served.url, api)
        server = start_server(stage, events, "--allow-faults")
        own = ("--listen", f"127.0.0.1:{sidecar_port}", "--control", f"127.0.0.1:{control_port}", "--cors-origin", site)
        _, control, _ = start_sidecar(stage, server, events, *own, goodput="ttft:5000")
        served.add("/given.json", json.dumps({"receipts": control, "closed": "http://127.0.0.1:1/v1/completions"}))
        open_chromium(stage, tmp_path / "talking", f"{site}/talking.html", name="talking")
        told = served.result(120)
        # The same address by a name that --cors-origin does not have.
        one_site = site.replace("127.0.0.1", "localhost")
        served.add("/given.json", json.dumps({"receipts": "/"}))
        open_chromium(stage, tmp_path / "opening", f"{one_site}/opening.html", name="opening")
        closed = served.result()["seen"]["closed"]["id"]
        until(lambda: closed in client_labels(events))
        until(lambda: nothing_is_open(events))  # what was left ends at the engine a step later
        leaving = open_chromium(stage, tmp_path / "leaving", f"{one_site}/leaving.html", name="leaving")
        left_behind = served.result()["seen"]["closed"]["id"]
        until(lambda: left_behind in client_labels(events))
        leaving.stop()  # it keeps the page and its connection, should the reader come back
        until(lambda: nothing_is_open(events))
        found = rows(events)
    seen = told["seen"]
    assert told["stats"] | {"lastError": ""} == {
        "requests": len(seen), "reported": len(seen), "rejected": 0, "lost": 0, "unjoined": 0, "observerErrors": 0,
        "lastError": "",
    }, told["stats"]  # fmt: skip

    # What the page got is what it would have got without us.
    whole = [seen[f"whole {number}"] for number in range(WHOLE)]
    for each in (*whole, seen["not streamed"]):
        assert each["isSame"] and each["status"] == 200
    assert all(
        (each["url"], each["type"], each["redirected"]) == (f"{site}/v1/completions", "basic", False) for each in whole
    )
    assert (seen["refused"]["status"], "temperature" in seen["refused"]["text"]) == (400, True)
    assert (seen["aborted"]["failure"], seen["aborted"]["closed"]) == ("AbortError", "AbortError")
    assert (seen["left"]["failure"], seen["late"]["failure"]) == ("disconnect", "TimeoutError")
    assert seen["unreached"]["failure"] == "TypeError"

    # Each ended as it did.
    row = {name: found[each["id"]] for name, each in seen.items() if each.get("id")}
    row |= {"closed": found[closed], "left behind": found[left_behind]}
    (unreached,) = (each for each in found.values() if not each["sidecar_observed"])
    voluntary, disconnect = ("cancelled", "voluntary"), ("cancelled", "disconnect")
    for name, expected in {
        **{f"whole {number}": ("completed", "") for number in range(WHOLE)},
        "not streamed": ("completed", ""), "held": ("completed", ""), "busy": ("completed", ""),
        "refused": ("failed", "http_error"), "aborted": voluntary, "enough": voluntary, "left": disconnect,
        "late": ("cancelled", "client_timeout"), "closed": disconnect, "left behind": disconnect,
    }.items():  # fmt: skip
        assert ends(row[name]) == expected, name
        if expected[0] == "cancelled":
            # The sidecar saw that it left, and has the reason from the page.
            assert (row[name]["sidecar_outcome"], row[name]["sidecar_reason"]) == expected, name
    assert ends(unreached) == ("failed", "connect_error") and not unreached["engine_observed"]

    # All observers of one request stand in one row, and the page sees of it what the sidecar sees, a little later.
    assert len(found) == len(seen) + 3  # two that pages left, and the one that was asked without us
    for name, each in row.items():
        assert each["client_observed"] and each["sidecar_observed"] and each["engine_observed"], name
        assert each["client_clock_id"].startswith("browser:") and each["tenant"] == "page", name
        assert abs(each["client_arrival_at_ns"] - each["sidecar_arrival_at_ns"]) < 2500 * MS, name
    assert len({each["client_clock_id"] for each in row.values()}) == 3  # one for each page
    for name in (*(f"whole {number}" for number in range(WHOLE)), "busy"):
        each = row[name]
        assert each["client_events"] == each["sidecar_events"] > 5, name
        assert each["client_tokens"] == each["sidecar_tokens"], name
        assert each["client_finish_reason"] == each["sidecar_finish_reason"] == "length", name
        # A browser rounds its clock to a tenth of a millisecond.
        assert each["client_ttft_ns"] + MS // 10 >= each["sidecar_ttft_ns"] >= each["engine_ttft_ns"] > 0, name
        assert each["client_stream_end_ns"] >= each["client_e2e_ns"] >= each["client_ttft_ns"], name
    assert row["closed"]["client_events"] >= 3 and row["aborted"]["client_events"] >= 1
    assert row["not streamed"]["client_ttft_ns"] is None and row["not streamed"]["client_e2e_ns"] > 0

    # 300 ms not read and 250 ms not at the loop are the page's own. The first probe may have been due 20 ms later.
    assert row["held"]["client_consumer_hold_ns"] >= 300 * MS > row["whole 1"]["client_consumer_hold_ns"]
    assert row["busy"]["client_loop_lag_max_ns"] >= 220 * MS
    labels = client_labels(events)
    assert labels[row["whole 0"]["request_id"]] == {"app": "chat"}
    figures = {
        name: [each[f"{side}_ttft_ns"] for side in ("client", "sidecar", "engine")] for name, each in row.items()
    }
    print(json.dumps(figures, indent=1))


TOO_OFTEN = (
    ASKING
    + """
const ask = async (name) => {
  const response = await watched(api, asked({}));
  await response.text();
  note(name, response);
};
const reported = async (count) => {
  for (let turns = 300; turns > 0 && stats().reported < count; turns--) await pause(50);
};
await Promise.all([0, 1, 2, 3, 4, 5, 6, 7].map((number) => ask(`first ${number}`)));
await reported(8);
const before = performance.now();
await ask("one more");
await reported(9);
await tell({ seen, waitedMs: performance.now() - before, stats: stats() });
"""
)


@contextmanager
def server_of_another_origin() -> Iterator[str]:
    """Streams three tokens to pages of any origin, as vLLM does, but takes no headers except its own."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_OPTIONS(self) -> None:
            self._head(204, ("access-control-allow-headers", "content-type"), ("content-length", "0"))

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            if "?" in self.path:
                self._head(404, ("content-length", "0"))
                return
            text = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n' * 3 + b"data: [DONE]\n\n"
            self._head(200, ("content-type", "text/event-stream"), ("content-length", str(len(text))))
            self.wfile.write(text)

        def _head(self, status: int, *headers: tuple[str, str]) -> None:
            self.send_response(status)
            for name, value in (("access-control-allow-origin", "*"), *headers):
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_page_that_reports_more_than_it_may_comes_back_once_when_it_was_told_to(tmp_path: Path) -> None:
    """Eight receipts where one a second is taken after a burst of one: the next is welcome 8 - 1 = 7 s later. The page
    posts every second, and would knock at 1, 3 and 7 s if it did not read Retry-After.
    """
    need("chromium")
    events = tmp_path / "events"
    with (
        server_of_another_origin() as server,
        serving({"/often.html": page(TOO_OFTEN)}) as served,
        Stage(tmp_path) as stage,
    ):
        own = ("--cors-origin", served.url, "--receipts-rate", "1", "--receipts-burst", "1", "--sql-every", "off")
        sidecar, control, _ = start_sidecar(stage, server, events, *own)
        served.add("/given.json", json.dumps({"receipts": control, "api": f"{sidecar}/v1/completions"}))
        open_chromium(stage, tmp_path / "profile", f"{served.url}/often.html")
        told = served.result(60)
        refused = scrape(control).total("sloscope_receipts_rejected_total", cause="rate")
        found = rows(events)
    assert (told["stats"]["reported"], told["stats"]["lost"], told["stats"]["rejected"]) == (9, 0, 0), told["stats"]
    assert refused == 1
    assert 5_000 < told["waitedMs"] < 15_000
    assert [ends(row) for row in found.values()] == [("completed", "")] * 9
    print(f"refused {refused} time, reported {told['waitedMs'] / 1e3:.1f} s after the request")


def test_a_page_of_another_origin_reads_the_id_that_the_sidecar_gave(tmp_path: Path) -> None:
    need("chromium")
    events = tmp_path / "events"
    with (
        server_of_another_origin() as server,
        serving({"/asking.html": page(ELSEWHERE)}) as served,
        Stage(tmp_path) as stage,
    ):
        (token := tmp_path / "token").write_text("secret")
        own = ("--cors-origin", served.url, "--token-file", str(token))
        sidecar, control, _ = start_sidecar(stage, server, events, *own)
        given = {"receipts": control, "token": "secret", "api": f"{sidecar}/v1/completions"}
        served.add("/given.json", json.dumps(given))
        open_chromium(stage, tmp_path / "profile", f"{served.url}/asking.html")
        told = served.result(60)
        found = rows(events)
    assert told["stats"]["reported"] == 2 and told["stats"]["unjoined"] == 0, told["stats"]
    answered, missing = (found[told["seen"][name]["id"]] for name in ("answered", "not there"))
    assert len(found) == 2
    assert ends(answered) == ("completed", "") and answered["client_events"] == answered["sidecar_events"] == 3
    assert ends(missing) == ("failed", "http_error") and missing["sidecar_reason"] == "http_error"
