"""Hedging through real processes: three reference servers, one of them slow."""

import json
from pathlib import Path

import pytest

from benchmarks import hedging

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_with_a_slow_server_hedging_answers_from_another_within_its_share(tmp_path: Path) -> None:
    """By requests, so that a slow server gets its turn whatever it has left to do."""
    options = ["--slow", "500ms", "--hedge-after", "150ms", "--max-share", "0.5", "--balance", "requests"]
    load = ["--rate", "8", "--requests", "30", "--rounds", "1"]
    kept = tmp_path / "hedging.json"
    assert hedging.main([*options, *load, "--format", "json", "--save", str(kept)]) == 0
    off, on = json.loads(kept.read_text())["real"]
    assert [(row["hedge_after"], row["requests"], row["completed"]) for row in (off, on)] == [
        ("off", 30, 30),
        ("150ms", 30, 30),
    ]
    assert off["to_slow"] > 0 and on["to_slow"] > 0
    assert (off["hedged"], off["won"], off["waste_prompt"]) == (0, 0, 0)
    assert 1 <= on["won"] <= on["hedged"] <= 0.5 * 30
    assert on["waste_prompt"] > 0
    # Where a step takes half a second more, a first token takes at least that.
    assert off["ttft_max_ms"] > 500
