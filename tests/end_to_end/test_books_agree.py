"""What a scrape says and what the journal says are the same, whatever the policies did meanwhile."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from sloscope.demo.processes import ask
from sloscope.records import Record
from tests.reference_server.serving import Served, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
REQUESTS = 48
POOL = 24
SEED = 20261130
EVER = "2000-01-01T00:00:00Z..2100-01-01T00:00:00Z"


def traffic(served: Served) -> Counter[int]:
    """Statuses. Prompts share their beginning, some are refused: for good, or because too many wait."""
    random = Random(SEED)

    def one(number: int) -> int:
        prompt = [100 + i for i in range(48)] + [150 + number] * random.randrange(1, 20)
        tokens = 1000 if number % 10 == 9 else random.randrange(40, 120)  # 1000 never fit into the pool
        return served.post(
            headers={"x-slo-tenant": f"t{number % 3}"}, prompt=prompt, max_tokens=tokens, stream=number % 2 == 0
        ).status_code

    with ThreadPoolExecutor(16) as pool:
        return Counter(pool.map(one, range(REQUESTS)))


def total(records: Iterable[Record], field: str) -> float:
    return sum(record.get(field, 0) for record in records)


def moves_to(states: Sequence[Record], state: str) -> int:
    return sum(record["to_state"] == state for record in states)


@pytest.mark.parametrize("reuse", [False, True])
def test_counters_and_gauges_agree_with_the_journal(tmp_path: Path, reuse: bool) -> None:
    served = Served(
        tmp_path, "--max-batch", "8", "--max-waiting", "6", "--prefill-tokens", "32", "--kv-blocks", str(POOL),
        "--block-tokens", "16", "--reservation", "optimistic", "--order", "vtc", *["--prefix-reuse"] * reuse,
    )  # fmt: skip
    statuses = traffic(served)
    assert statuses.keys() == {200, 400, 429}, statuses
    ended = "sloscope_engine_requests_ended_total{"
    until(lambda: sum(n for key, n in served.metrics().items() if key.startswith(ended)) == REQUESTS)
    until(lambda: served.metrics()['sloscope_engine_kv_blocks{kind="free"}'] == POOL)
    metrics = served.metrics()
    assert served.stop() == 0
    journal = served.journal()
    steps, states, decisions, ends = (
        [r for r in journal if r["kind"] == kind] for kind in ("step", "state", "decision", "end")
    )
    m = {key.removeprefix("sloscope_engine_"): n for key, n in metrics.items()}

    (engine,) = (r for r in journal if r["kind"] == "engine")
    assert engine["policies"].items() >= {
        "order": "vtc", "reservation": "optimistic", "prefill": "32", "prefix_reuse": reuse, "max_waiting": 6,
        "max_undelivered": 256, "slow_reader_after": "30s",
    }.items()  # fmt: skip

    assert m["step_seconds_count"] == len(steps)
    assert m["decode_step_seconds_count"] == sum(not r["prefill_ids"] for r in steps)
    assert m["step_seconds_sum"] == pytest.approx(sum(r["end_ns"] - r["start_ns"] for r in steps) / 1e9)
    first_run = sum(sum(r["prefill_charged_counts"]) for r in steps)
    assert m["prompt_tokens_total"] == first_run > 0
    assert m["recomputed_tokens_total"] == total(steps, "prefill_tokens") - first_run > 0
    assert m["output_tokens_total"] == total(steps, "sampled_tokens") > 0
    assert m["prefix_reused_tokens_total"] == total(steps, "reused_tokens")
    assert (m["prefix_reused_tokens_total"] > 0) == reuse
    assert m["modelled_flops_total"] == total(steps, "modelled_flops") > 0
    assert m["modelled_bytes_total"] == total(steps, "modelled_bytes") > 0
    for phase in ("prefill", "decode"):
        for part in ("linear", "attention"):
            assert m[f'work_flops_total{{part="{part}",phase="{phase}"}}'] == total(steps, f"{phase}_{part}_flops") > 0
    for part, field in (("weights", "weight"), ("kv_read", "kv_read"), ("kv_write", "kv_write"), ("transfer",) * 2):
        assert m[f'work_bytes_total{{part="{part}"}}'] == total(steps, f"{field}_bytes") > 0

    assert m["preemptions_total"] == moves_to(states, "PREEMPTED") > 0
    assert m["preemptions_total"] == sum(len(r.get("preempted_ids", ())) for r in steps)
    assert m['pauses_total{reason="flow_control"}'] == moves_to(states, "PAUSED")
    first = sum(r["reason"] == "first_token" for r in states)  # every answer has two tokens and more
    assert m["queue_seconds_count"] == sum(r["reason"] == "admitted" for r in states)
    assert m["prefill_seconds_count"] == m["ttft_seconds_count"] == first == statuses[200]
    assert m["token_interval_seconds_count"] == m["output_tokens_total"] - first

    said = Counter((r["verdict"], r["reason"]) for r in decisions)
    shown = {key: n for key, n in m.items() if key.startswith("admissions_total{") and n}
    assert shown == {
        f'admissions_total{{reason="{reason}",verdict="{verdict}"}}': n for (verdict, reason), n in said.items()
    }
    assert {verdict for verdict, _ in said} == {"admit", "queue", "refuse"}
    outcomes = Counter(r["outcome"] for r in ends)
    assert {outcome: m[f'requests_ended_total{{outcome="{outcome}"}}'] for outcome in outcomes} == outcomes
    assert m["requests_offered_total"] == sum(r["kind"] == "begin" for r in journal) == len(ends) == REQUESTS
    assert outcomes == {"completed": statuses[200], "failed": statuses[400] + statuses[429]}

    # At rest: nobody is alive, and the pool is as empty as after the last step.
    latest = {r["request_id"]: r["to_state"] for r in states}
    assert set(latest.values()) == {"FINISHED", "REJECTED"}
    assert all(n == 0 for key, n in m.items() if key.startswith("requests{"))
    assert m["undelivered_tokens"] == m["kv_blocks_paused"] == 0
    assert {n for key, n in m.items() if key.startswith("oldest_waiting_seconds{")} == {0}
    kinds = ("resident", "reserved", "free")
    assert {k: m[f'kv_blocks{{kind="{k}"}}'] for k in kinds} == {k: steps[-1][f"kv_blocks_{k}"] for k in kinds}
    assert all(sum(r[f"kv_blocks_{k}"] for k in kinds) == POOL for r in steps)
    assert m["kv_blocks_cached"] == steps[-1]["kv_blocks_cached"]
    assert (m["kv_blocks_cached"] > 0) == reuse

    asked = ["tenant_service", "--events", str(served.events), "--goodput", "ttft:300", "--window", EVER]
    rows = json.loads(ask("query", *asked, "--format", "json"))
    assert {f"t{number}" for number in range(3)} == {row["tenant"] for row in rows}
    for row in rows:
        assert row["service_units"] == m[f'service_units_total{{tenant="{row["tenant"]}"}}'], row
