"""Hedging through real processes: three reference servers, one of them slow."""

import json
from pathlib import Path

import httpx
import pytest

from benchmarks import hedging
from sloscope.demo.processes import Stage, ask
from tests.end_to_end.support import start_server, start_sidecar, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_with_a_slow_server_hedging_answers_from_another_within_its_share(tmp_path: Path) -> None:
    """By requests, so that a slow server gets its turn whatever it has left to do. It is in an answer for three
    seconds, and gets no other meanwhile where nobody frees it: at two requests a second some five of thirty.
    """
    options = ["--slow", "200ms", "--hedge-after", "80ms", "--max-share", "0.6", "--balance", "requests"]
    load = ["--rate", "2", "--requests", "30", "--rounds", "1"]
    kept = tmp_path / "hedging.json"
    assert hedging.main([*options, *load, "--format", "json", "--save", str(kept)]) == 0
    off, on = json.loads(kept.read_text())["real"]
    assert [(row["hedge_after"], row["requests"], row["completed"]) for row in (off, on)] == [
        ("off", 30, 30),
        ("80ms", 30, 30),
    ]
    assert off["to_slow"] * 30 >= 2 and on["to_slow"] > 0
    assert (off["hedged"], off["won"], off["waste_prompt"]) == (0, 0, 0)
    assert 1 <= on["won"] <= on["hedged"] <= 0.6 * 30
    assert on["waste_prompt"] > 0
    # Where a step takes 200 ms more a first token takes at least that, and p95 of 30 is the 29th of them. Hedged, such
    # a request waits 80 ms and has it from a quick server.
    for quantile in ("ttft_p95_ms", "ttft_p99_ms"):
        assert off[quantile] > 200
        assert on[quantile] < 0.75 * off[quantile], quantile


def test_a_quantile_hedges_once_enough_first_outputs_are_known(tmp_path: Path) -> None:
    """p50 needs ten first outputs. They are of quick servers; then one of the two takes 600 ms more for each step."""
    with Stage(tmp_path) as stage:
        events = tmp_path / "events"
        engines = [tmp_path / name for name in ("slow", "quick")]
        slow, quick = (start_server(stage, each, "--allow-faults", name=each.name) for each in engines)
        options = ("--upstream", quick, "--hedge-after", "p50", "--hedge-max-share", "1", "--balance", "requests")
        proxy, control, _ = start_sidecar(stage, slow, events, *options, "--sql-every", "off", goodput="ttft:5000")
        asked = {"model": "builtin", "prompt": "the tree", "max_tokens": 6, "stream": True}

        def ask_for(requests: int) -> None:
            for _ in range(requests):
                httpx.post(f"{proxy}/v1/completions", json=asked, timeout=60).raise_for_status()

        def results() -> dict[str, float]:
            return {name: count for name, count in hedging.counted(control).items() if name != "waste" and count}

        ask_for(10)
        assert until(results) == {"no_threshold": 10}
        with hedging.kept_slow(slow, "builtin", "slow=600ms"):
            ask_for(8)
        until(lambda: sum(results().values()) == 18)
        found = results()
        assert found["no_threshold"] == 10 and found["won"] >= 2  # every second one began at the slow one
        arrived = {(each["request_id"], each.get("attempt", 0)): each for each in hedging.records(events, "sidecar")
                   if each["kind"] == "begin"}  # fmt: skip
    second = [key for key in arrived if key[1] == 1]
    assert len(second) == found["won"] + found.get("lost", 0)


def test_the_questions_follow_the_engine_that_answered(tmp_path: Path) -> None:
    """Both servers and the sidecar share a directory. The slow one is asked first and last."""
    events = tmp_path / "events"
    goodput = "ttft:5000 itl_max:5000"
    with Stage(tmp_path) as stage:
        slow, quick = (start_server(stage, events, "--allow-faults", name=name) for name in ("slow", "quick"))
        options = ("--upstream", quick, "--hedge-after", "100ms", "--hedge-max-share", "1", "--balance", "requests")
        proxy, _, _ = start_sidecar(stage, slow, events, *options, "--sql-every", "off", goodput=goodput)
        asked = {"model": "builtin", "prompt": "the tree", "max_tokens": 6, "stream": True}
        with hedging.kept_slow(slow, "builtin", "slow=600ms"):
            for _ in range(8):
                httpx.post(f"{proxy}/v1/completions", json=asked, timeout=60).raise_for_status()

    def rows(*asked: str) -> list[dict[str, object]]:
        shown = ("--events", str(events), "--goodput", goodput, "--observer", "sidecar", "--format", "json")
        found: list[dict[str, object]] = json.loads(ask(*asked, *shown))
        return found

    won = [each for each in hedging.records(events, "sidecar") if each["kind"] == "end" and each.get("attempt") == 1]
    assert len([each for each in won if each["outcome"] == "completed"]) >= 2  # every second one began at the slow one
    sql = "select sidecar_outcome, sidecar_alignment, engine_outcome from requests where sidecar_observed"
    seen = [tuple(row.values()) for row in rows("sql", sql)]
    assert seen == [("completed", "ordinal", "completed")] * 8
    budget = {row["link"]: row for row in rows("query", "ttft_budget")}
    assert budget["prefill"]["n"] == 8
    assert {link: row["negative"] for link, row in budget.items() if row["negative"]} == {}
