"""The sidecar and the engine record in directories of their own, and the sidecar's questions have both sides."""

import json
from pathlib import Path

import httpx
import pytest

from sloscope.demo.processes import Stage, ask
from tests.end_to_end.support import start_server, start_sidecar
from tests.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
GOODPUT = "ttft:5000 itl_max:2000"
ENGINE_LINKS = {"front_end", "queue", "prefill", "first_emission"}


def links(rows: list[dict[str, object]]) -> set[object]:
    return {row["link"] for row in rows if row["n"]}


def test_questions_of_the_sidecar_join_the_engines_records_of_another_directory(tmp_path: Path) -> None:
    engine, ours, alone = (tmp_path / name for name in ("engine", "ours", "alone"))
    with Stage(tmp_path) as stage:
        server = start_server(stage, engine)
        joined = start_sidecar(
            stage, server, ours, "--engine-events", str(engine), "--sql-every", "1s", goodput=GOODPUT
        )
        apart = start_sidecar(stage, server, alone, goodput=GOODPUT, name="apart")
        asked = {"model": "builtin", "prompt": "the river", "max_tokens": 8, "stream": True}
        for proxy, _, _ in (joined, apart):
            for _ in range(5):
                httpx.post(f"{proxy}/v1/completions", json=asked, timeout=60).raise_for_status()

        def budget(control: str) -> set[object]:
            return links(httpx.get(f"{control}/api/q/ttft_budget?observer=sidecar", timeout=60).json())

        until(lambda: budget(joined[1]) >= ENGINE_LINKS, 30)
        assert not ENGINE_LINKS & budget(apart[1])
        holds = f"{joined[1]}/api/q/request_diagnosis?observer=sidecar"
        verdicts = {row["verdict"] for row in httpx.get(holds, timeout=60).json()}
        assert not any(str(verdict).startswith("suspected") for verdict in verdicts)
        # Started again on the same two directories it finds what it made.
        stage.stop(joined[2])
        start_sidecar(stage, server, ours, "--engine-events", str(engine), goodput=GOODPUT, name="again")
    # Without any sidecar: the directory itself is whole.
    said = ask("query", "ttft_budget", "--events", str(ours), "--observer", "sidecar", "--format", "json")
    assert links(json.loads(said)) >= ENGINE_LINKS
