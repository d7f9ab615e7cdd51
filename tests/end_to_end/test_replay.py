"""The replay against the real reference server: prefixes that are really shared, refusals, slow readers, processes."""

import json
from collections import Counter
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from reference_server.builtin import make_builtin
from reference_server.tokenizer import Tokenizer
from sloscope import contract as contracts
from sloscope.client import schedule, traces
from sloscope.demo.processes import ask
from sloscope.records import Record
from tests.journals import journal_of
from tests.reference_server.serving import Served

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

GOODPUT = "ttft:5000 itl_max:200"
REUSED = "sloscope_engine_prefix_reused_tokens_total"
BLOCK = 16  # tokens of a KV block
# Chains of ids. The third begins as the first two do, the fifth is the second again, the last shares nothing.
CHAINS = [[1, 2, 3], [1, 2, 4, 5], [1, 2, 3, 6], [7, 8], [1, 2, 4, 5], [9]]
SCALE = 0.125  # blocks of 64 tokens


def replay(served: Served, trace: str, *options: str, timeout_s: float = 120) -> dict[str, Any]:
    out = ask(
        "replay", trace, "--url", served.url, "--events", str(served.events), "--goodput", GOODPUT, "--format", "json",
        *options, timeout_s=timeout_s,
    )  # fmt: skip
    (row,) = json.loads(out)
    return dict(row)


def requests(served: Served) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(
        ask("sql", "select * from requests", "--events", str(served.events), "--format", "json")
    )
    return rows


def metric(served: Served, name: str) -> float:
    return sum(value for series, value in served.metrics().items() if series.partition("{")[0] == name)


def predicted(prompts: list[list[int]]) -> int:
    """Tokens that a cache of whole blocks which forgets nothing gives, one request after another. The last token of a
    prompt is always run.
    """
    found = 0
    for number, prompt in enumerate(prompts):
        common = max(
            (sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, before, strict=False)))
             for before in prompts[:number]),
            default=0,
        )  # fmt: skip
        found += min(common, len(prompt) - 1) // BLOCK * BLOCK
    return found


def test_a_mooncake_traces_prefixes_are_found_by_the_servers_cache_as_predicted(tmp_path: Path) -> None:
    trace = tmp_path / "mooncake.jsonl"
    trace.write_text(
        "".join(
            json.dumps({"timestamp": 700 * n, "input_length": 512 * len(ids) - 40, "output_length": 4, "hash_ids": ids})
            + "\n"
            for n, ids in enumerate(CHAINS)
        )
    )
    options = ("--scale-prompts", str(SCALE), "--seed", "5", "--api", "completions")
    shape = json.loads(ask("replay", str(trace), "--dry-run", "--goodput", GOODPUT, "--format", "json", *options))[0]
    fixed = schedule.build(
        traces.load(str(trace), seed=5).rows,
        contracts.from_shorthand(GOODPUT),
        schedule.Plan(scale_prompts=SCALE, seed=5),
    )
    text = schedule.PromptText(5, fixed.block_tokens)
    tokenizer = Tokenizer(make_builtin().tokenizer)
    prompts = [tokenizer.encode(text.prompt(row).decode()) for row in fixed.requests]

    served = Served(tmp_path, "--prefix-reuse", "--block-tokens", str(BLOCK))
    try:
        row = replay(served, str(trace), *options)
        reused = metric(served, REUSED)
    finally:
        served.stop()
    assert (row["completed"], row["offered"]) == (len(CHAINS), len(CHAINS))
    assert reused == predicted(prompts) > 0
    # What the dry run says in words of the trace, the server finds in tokens, but for parts of its blocks.
    words = shape["shared_prefix_share"] * shape["prompt_tokens_sum"]
    per_word = sum(map(len, prompts)) / shape["prompt_tokens_sum"]
    print(f"prompt tokens {sum(map(len, prompts))}, shared by the trace {words:.0f} words, reused {reused:.0f} tokens")
    assert 0.85 * words * per_word <= reused <= 1.15 * words * per_word


def test_refused_requests_come_again_until_they_are_answered(tmp_path: Path) -> None:
    trace = tmp_path / "burst.jsonl"
    trace.write_text('{"at_s": 0, "prompt_tokens": 20, "output_tokens": 40}\n' * 8)
    served = Served(tmp_path, "--max-batch", "1", "--max-waiting", "1")
    try:
        row = replay(served, str(trace), "--retries", "12", "--drain", "60s")
    finally:
        served.stop()
    print({name: row[name] for name in ("sent", "retries", "retries_completed", "failed", "completed", "wall_s")})
    # One runs and one waits: the others are refused, and each comes again until it is answered.
    assert (row["scheduled"], row["completed"]) == (8, 8) and row["retries_completed"] >= 5
    assert row["failed"] == row["retries"] == row["sent"] - 8 and row["reasons"] == f"failed(rejected)={row['retries']}"
    assert row["retries_not_sent"] == 0
    rows = {each["request_id"]: each for each in requests(served)}
    assert len(rows) == row["sent"]
    retried = Counter(each["retry_of"] for each in rows.values() if each["retry_of"])
    assert retried.total() == row["retries"] and set(retried.values()) == {1}
    assert {rows[request_id]["client_reason"] for request_id in retried} == {"rejected"}
    # The server heard of each retry what it is one of.
    journal = journal_of(served.events)
    heard = {r["request_id"]: r.get("retry_of") for r in journal if r["kind"] == "begin" and r["observer"] == "engine"}
    assert heard == {request_id: each["retry_of"] for request_id, each in rows.items()}


def states(journal: list[Record]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for record in journal:
        if record["kind"] == "state":
            found.setdefault(record["request_id"], set()).add(record["to_state"])
    return found


def test_a_slow_reader_pauses_its_own_sequence_in_the_engine(tmp_path: Path) -> None:
    trace = tmp_path / "long.jsonl"
    trace.write_text("".join(f'{{"at_s": 0.{n}, "prompt_tokens": 20, "output_tokens": 250}}\n' for n in range(6)))
    served = Served(tmp_path, "--max-undelivered", "32", "--send-buffer", "4096")
    try:
        row = replay(served, str(trace), "--slow-readers", "0.5", "--read-pause", "1s", "--seed", "2")
    finally:
        served.stop()
    assert row["completed"] == 6 and 0 < row["slow_readers"] < 6
    journal = journal_of(served.events)
    slow = {r["request_id"] for r in journal if r["kind"] == "begin" and r.get("labels", {}).get("slow_reader")}
    paused = {request_id for request_id, seen in states(journal).items() if "PAUSED" in seen}
    assert len(slow) == row["slow_readers"] and slow <= paused
    holds = {r["request_id"]: r["consumer_hold_ns"] for r in journal if r["kind"] == "end" and "consumer_hold_ns" in r}
    assert set(holds) == slow and min(holds.values()) > 1_000_000_000
    # They waited for long, and it was neither the engine nor the delivery: but for what a busy machine added.
    told = json.loads(ask("query", "holds", "--events", str(served.events), "--format", "json"))
    excess_s: Counter[str] = Counter()
    for each in told:
        if each["request_id"] in slow:
            excess_s[each["verdict"]] += each["excess_s"]
    print(dict(excess_s))
    assert excess_s["client_late"] >= 0.8 * excess_s.total() > 0


def test_two_processes_offer_the_load_of_one_and_every_record_joins(tmp_path: Path) -> None:
    served = Served(tmp_path)
    try:
        row = replay(served, "synthetic:poisson?rate=20&n=60&prompt_p50=20&output_p50=10", "--processes", "2")
    finally:
        served.stop()
    assert (row["processes"], row["scheduled"], row["sent"], row["completed"]) == (2, 60, 60, 60)
    assert row["valid"] is True
    writers = {path.name for path in (served.events / "journal" / "client").iterdir()}
    assert len(writers) == 2
    rows = requests(served)
    assert len(rows) == 60 and all(each["client_outcome"] == each["engine_outcome"] == "completed" for each in rows)
