"""Tabs of one real Chromium: every event passes the engine, the sidecar and the page in this order, each tab is a clock
of its own, and one that goes takes nothing from the other.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from sloscope.demo.processes import Stage, ask
from tests.end_to_end.browser import open_chromium, page, serving
from tests.end_to_end.support import free_port, need, start_nginx, start_server, start_sidecar
from tests.end_to_end.test_browser import ASKING, client_labels, ends, nothing_is_open, rows
from tests.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
MS = 1_000_000
ROUNDING_NS = 2 * 100_000  # Chromium rounds both stamps of a difference to 0.1 ms

READING = (
    ASKING
    + """
const tab = new URL(location.href).searchParams.get("tab");
const read = async (name) => {
  const response = await chat({ max_tokens: 60 });
  await response.text();
  note(name, response);
};
await Promise.all([read(`${tab} a`), read(`${tab} b`)]);

const cancelled = await long({});
const reader = cancelled.body.getReader();
await reader.read();
await reader.cancel();
note(`${tab} cancelled`, cancelled);

const controller = new AbortController();
const aborted = await long({ signal: controller.signal });
const abortedReader = aborted.body.getReader();
await abortedReader.read();
controller.abort();
note(`${tab} aborted`, aborted, { failure: await failure(abortedReader.read()) });

// Before there is a response, too.
const early = new AbortController();
const unanswered = watched("/v1/completions", asked({ max_tokens: 400 }, { signal: early.signal }));
early.abort("disconnect");
note(`${tab} unanswered`, null, { failure: await failure(unanswered) });

const waiting = await chat({});
await pause(300); // what has come waits until somebody reads
await waiting.text();
note(`${tab} waiting`, waiting);

const open = tab === "one" ? null : await long({});
if (open) {
  const left = open.body.getReader();
  for (let i = 0; i < 3; i++) await left.read();
  note("left open", open);
}
for (let turns = 200; turns > 0 && stats().reported < stats().requests - (open ? 1 : 0); turns--) await pause(50);
await tell({ seen, stats: stats() });
if (open) opener.postMessage("close me", "*");
else {
  // Still here when the other has gone.
  for (let turns = 300; turns > 0 && !(await (await fetch("/given.json")).json()).isGone; turns--) await pause(50);
  await read("one after");
  for (let turns = 200; turns > 0 && stats().reported < stats().requests; turns--) await pause(50);
  await tell({ seen: { "one after": seen["one after"] }, stats: stats() });
}
"""
)

OPENING = """
open("/reading.html?tab=one");
const two = open("/reading.html?tab=two");
addEventListener("message", () => two.close());
"""


def stamps(events: Path) -> dict[str, dict[str, Any]]:
    """request id → the stamps of every event at each observer."""
    columns = "client_t_ns, sidecar_t_ns, sidecar_forwarded_ns, engine_computed_ns, engine_handed_ns, engine_written_ns"
    given = ("sql", f"select request_id, {columns} from chunks", "--events", str(events), "--format", "json")
    return {row["request_id"]: row for row in json.loads(ask(*given, "--goodput", "ttft:5000"))}


def assert_in_order(row: dict[str, Any], of: dict[str, Any]) -> list[int]:
    """Every event left the engine, then the sidecar, and came to the page after that; what each link added, ns."""
    computed, handed, written = (of[f"engine_{name}_ns"] for name in ("computed", "handed", "written"))
    received, forwarded, came = of["sidecar_t_ns"], of["sidecar_forwarded_ns"], of["client_t_ns"]
    assert len(computed) == len(handed) == len(written) == len(received) == len(forwarded) == len(came) > 5
    # Engine and sidecar of one host stamp by one clock.
    assert row["sidecar_clock_id"] == row["engine_clock_id"]
    for each in zip(computed, handed, written, received, forwarded, strict=True):
        assert list(each) == sorted(each)  # each stamp of a write is taken before the write
    # The page's clock is another. Its send was before the request's arrival at the sidecar, and its receipts are after
    # the sidecar's writes: so its durations are the longer ones.
    added = []
    for at, sent in zip(came, forwarded, strict=True):
        client, sidecar = at - row["client_start_ns"], sent - row["sidecar_start_ns"]
        assert client + ROUNDING_NS >= sidecar
        added.append(client - sidecar)
    return added


def test_every_event_leaves_the_engine_then_the_sidecar_and_then_comes_to_the_tab_that_asked(tmp_path: Path) -> None:
    need("chromium")
    events = tmp_path / "events"
    with (
        serving({"/opening.html": page(OPENING), "/reading.html": page(READING)}) as served,
        Stage(tmp_path) as stage,
    ):
        server = start_server(stage, events, "--allow-faults")
        sidecar_port = free_port()
        unbuffered = f"proxy_pass http://127.0.0.1:{sidecar_port}; proxy_http_version 1.1; proxy_buffering off;"
        site = start_nginx(stage, tmp_path / "nginx", served.url, f"}} location /v1/ {{ {unbuffered}")
        (token := tmp_path / "token").write_text("secret")
        # Receipts go to another origin that asks for a token: the browser asks there first, also while a page closes.
        own = ("--listen", f"127.0.0.1:{sidecar_port}", "--cors-origin", site, "--token-file", str(token))
        _, control, _ = start_sidecar(stage, server, events, *own, goodput="ttft:5000")
        served.add("/given.json", json.dumps({"receipts": control, "token": "secret"}))
        open_chromium(stage, tmp_path / "profile", f"{site}/opening.html")
        told = [served.result(120), served.result(120)]
        (left_open,) = (each["seen"]["left open"]["id"] for each in told if "left open" in each["seen"])
        until(lambda: left_open in client_labels(events))  # left behind by a page that is gone
        served.add("/given.json", json.dumps({"isGone": True}))
        told.append(served.result(60))
        until(lambda: nothing_is_open(events))
        found, stamped = rows(events), stamps(events)

    seen = {name: each for result in told for name, each in result["seen"].items()}
    for result in told:
        assert result["stats"]["observerErrors"] == result["stats"]["lost"] == result["stats"]["rejected"] == 0
    row = {name: found[each["id"]] for name, each in seen.items() if each.get("id")}
    voluntary, disconnect = ("cancelled", "voluntary"), ("cancelled", "disconnect")
    expected = {
        f"{tab} {name}": end
        for tab in ("one", "two")
        for name, end in {
            "a": ("completed", ""), "b": ("completed", ""), "waiting": ("completed", ""),
            "cancelled": voluntary, "aborted": voluntary,
        }.items()
    } | {"one after": ("completed", ""), "left open": disconnect}  # fmt: skip
    assert {name: ends(each) for name, each in row.items()} == expected
    # Aborted before there was a response: two more requests, which had no id to tell.
    unanswered = [each for each in found.values() if each not in row.values()]
    assert [ends(each) for each in unanswered] == [disconnect] * 2 and seen["one unanswered"]["failure"] == "disconnect"

    whole = [name for name, end in expected.items() if end[0] == "completed"]
    for name in whole:
        each = row[name]
        assert each["client_observed"] and each["sidecar_observed"] and each["engine_observed"], name
        assert each["client_events"] == each["sidecar_events"] == each["engine_events"], name
        assert each["client_alignment"] == each["sidecar_alignment"] == "ordinal", name
        added = assert_in_order(each, stamped[each["request_id"]])
        print(f"{name}: the page's durations are longer by {min(added) / MS:.2f} to {max(added) / MS:.2f} ms")
    for name in ("one waiting", "two waiting"):
        assert row[name]["client_consumer_hold_ns"] >= 300 * MS > row["one a"]["client_consumer_hold_ns"], name

    # Two clocks for two tabs; and one goes on after the other has gone.
    clocks = {
        tab: {each["client_clock_id"] for name, each in row.items() if name.startswith(tab)} for tab in ("one", "two")
    }
    assert len(clocks["one"]) == len(clocks["two"]) == 1 and clocks["one"] != clocks["two"]
    assert row["left open"]["client_clock_id"] in clocks["two"] and row["left open"]["client_events"] >= 3
