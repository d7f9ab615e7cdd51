"""What the simulated benchmarks take for granted: who knows the step times, and bounds that are known beforehand."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.fairness import admission_bound_steps, attainment, broken, late_bound_steps, worst_step_ns
from benchmarks.fairness import main as fairness
from benchmarks.load import Learning, Server, arrivals, deadline_admission, planned, simulate
from benchmarks.paged_attention import main as paged_attention
from benchmarks.paged_attention import paged
from reference_server.cost_model import CostModel, OnlineFit, StepShape
from reference_server.request import Request
from reference_server.simulation import Result

COST = CostModel(1_000_000, 10_000, 100_000, 100)
SERVER = Server(slots=4, kv_tokens=1024, block_tokens=32, max_context=512, prefill_tokens=64)


@pytest.mark.parametrize("factor", [None, 3.0])
def test_simulated_admission_learns_the_step_times_from_the_steps(factor: float | None) -> None:
    requests, contract = planned("synthetic:poisson?rate=50&n=100&prompt_p50=64&output_p50=16", "ttft:200", seed=1)
    costs = OnlineFit(None if factor is None else COST.scaled(factor))
    admission = deadline_admission(costs, SERVER)
    simulation = simulate(
        arrivals(requests, contract, SERVER), SERVER, COST, admission=admission, observers=[Learning(costs)]
    )
    assert costs.steps == simulation.steps > 100
    assert costs.model is not None
    # 1 ms + 64 tokens of 10 us + 3 of 100 us + 500 positions of 100 ns, and the noiseless steps say so.
    assert costs.model.step_ns(StepShape(64, 3, 500)) == pytest.approx(1_990_000, rel=0.05)


def test_the_delay_by_a_flood_is_bounded_by_the_largest_request_at_a_full_batch() -> None:
    requests = [Request("a", [1] * 300, 90, stop_after=40), Request("b", [1] * 20, 50)]
    # Prompts of min(4 slots * 300, 1024 of the pool) tokens in chunks of 64 are 16 steps; the longest answer makes 50;
    # and the step that runs when the wait begins.
    assert admission_bound_steps(SERVER, requests) == 16 + 50 + 1
    # Two others and itself; a prompt of 300 tokens is 5 chunks, and each waits for two others' turns.
    assert late_bound_steps(SERVER, requests, others=2) == 3 * (67 + 5)
    # 1 ms, 64 prompt tokens, 4 decodes, 1024 positions read.
    assert worst_step_ns(COST, SERVER, requests) == 1_000_000 + 640_000 + 400_000 + 102_400


def test_a_bound_that_does_not_hold_is_named_and_one_that_was_not_judged_is_not() -> None:
    kept = {"order": "vtc", "gap_within_bound": True, "attainment_within_bound": None}
    assert broken([kept]) == []
    assert broken([kept, kept | {"order": "drr", "gap_within_bound": False}]) == ["drr: gap_within_bound"]


def test_attainment_counts_first_tokens_of_the_polite_that_had_the_time() -> None:
    def result(tenant: str, arrived_ns: int, first_ns: int | None) -> Result:
        return Result(Request(f"{tenant}{arrived_ns}", [1], 1, tenant=tenant, arrived_ns=arrived_ns), first_ns)

    results = [result("polite", 0, 10), result("polite", 5, 16), result("polite", 6, None), result("polite", 9, None)]
    results.append(result("flood-a", 0, None))
    assert attainment(results, limit_ns=10, arrived_by_ns=6) == 1 / 3  # 10 ns, 11 ns, never; the last came too late
    assert attainment(results, limit_ns=10, arrived_by_ns=-1) is None


def test_the_fairness_benchmark_holds_the_orders_to_bounds_and_not_first_come_first_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cost = tmp_path / "cost.json"
    cost.write_text(CostModel(1_000_000, 2_000, 10_000, 10).to_json())
    options = ["--cost-model", str(cost), "--seconds", "0.5", "--format", "json"]
    options += ["--lengths", "prompt_p50=64&prompt_sigma=0.3&output_p50=8&output_sigma=0.3"]
    monkeypatch.setattr(sys, "argv", ["fairness", *options])
    assert fairness() == 0
    rows = json.loads(capsys.readouterr().out)
    columns = ("order", "gap_within_bound", "attainment_within_bound")
    expected = [("fcfs", None, None), ("vtc", True, True), ("drr", True, True)]
    assert [tuple(row[column] for column in columns) for row in rows] == expected


def test_both_ways_to_attend_give_the_same_numbers_and_every_size_of_block_has_a_row(
    capsys: pytest.CaptureFixture[str],
) -> None:
    threads = torch.get_num_threads()
    try:
        paged_attention(
            ["--batches", "1", "3", "--context", "70", "--layers", "2", "--rounds", "1", "--format", "json"]
        )
    finally:
        torch.set_num_threads(threads)
    rows = json.loads(capsys.readouterr().out)
    found = [(row["batch"], row["block_tokens"]) for row in rows]
    assert found == [(1, 16), (1, 32), (1, 64), (3, 16), (3, 32), (3, 64)]
    with torch.inference_mode():
        gathered, blockwise = paged(3, 70, 1, 16)
        assert torch.allclose(gathered(), blockwise(), atol=1e-5)
