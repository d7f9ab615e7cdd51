"""What is promised at admission, and what a common beginning saves: `--reservation` and `--prefix-reuse`, off and on.

Reservation. The same requests come to three servers with the same small pool. Their `max_tokens` is many times what
their answers have (`x-sloscope-stop-after`). `full` promises all of it; `optimistic` what is there; `estimate` goes by
the lengths of a trace from another seed. Prefix. Requests that begin with the same tokens come one after
the other, to a server without and one with reuse.

`at_once` is over the time of the steps, shares are of the pool, `run_twice` are the tokens that preempted requests lost
and ran again, and `steps` says how many it took. A p99 of fewer than 299 requests is not given.
`python -m benchmarks.kv_reservation`.
"""

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import httpx

from benchmarks.kept import options_of, save
from benchmarks.load import earlier_curve, synthetic
from benchmarks.served import (
    PATIENT,
    WHOLE_S,
    Row,
    at_once,
    positive,
    quantile_of,
    questions,
    replay,
    rounded,
    run,
    served,
    served_options,
    write_trace,
)
from sloscope.client import ReceiptTransport
from sloscope.client.schedule import PromptText
from sloscope.contract import from_shorthand
from sloscope.output import print_rows

RESERVATIONS = ("full", "optimistic", "estimate")


def reservation_rows(asked: argparse.Namespace, folder: Path) -> list[Row]:
    """The servers take turns, so that a slow minute of the machine hits all of them."""
    drawn = synthetic(asked.rate, asked.requests / asked.rate, asked.lengths)
    lengths = folder / "lengths.json"
    lengths.write_text(earlier_curve(drawn, PATIENT, asked.seed + asked.rounds), encoding="utf-8")
    pool = ("--kv-blocks", str(asked.kv_blocks), "--block-tokens", str(asked.block_tokens))
    with ExitStack() as servers:
        urls = {}
        for name in RESERVATIONS:
            known = ("--lengths", str(lengths)) if name == "estimate" else ()
            options = (*pool, "--max-batch", str(asked.max_batch), "--reservation", name, *known)
            urls[name] = servers.enter_context(served(asked, folder / name, *options))
        for seed in range(asked.seed, asked.seed + asked.rounds):
            trace = folder / f"trace-{seed}.jsonl"
            write_trace(trace, drawn, seed, asked.max_tokens)
            for name, url in urls.items():
                replay(trace, url, folder / name, seed)
    return [reservation_row(name, folder / name) for name in RESERVATIONS]


def reservation_row(name: str, events: Path) -> Row:
    with questions(events, from_shorthand(PATIENT)) as session:
        (kv,) = session.run("kv_usage", bucket_s=WHOLE_S).rows
        (goodput,) = session.run("goodput").rows
        mean, p95 = at_once(session)
        # What a step ran and did not charge was run before.
        (again,) = session.sql("select sum(tokens - charged) as tokens from step_requests where role = 'prefill'").rows
        return {
            "reservation": name,
            "completed": goodput["completed"],
            "at_once_mean": rounded(mean, 1),
            "at_once_p95": p95,
            "ttft_p50_s": rounded(quantile_of(session, "ttft", "p50"), 3),
            "ttft_p99_s": rounded(quantile_of(session, "ttft", "p99"), 3),
            "preemptions": kv["preemptions"],
            "run_twice": int(again["tokens"]),
            "resident_share": round(kv["resident_share"], 3),
            "reserved_share": round(kv["promised_share"] - kv["resident_share"], 3),
            "steps": kv["steps"],
        }


def prefix_rows(asked: argparse.Namespace, folder: Path) -> list[Row]:
    rows = []
    for name, options in (("off", ()), ("on", ("--prefix-reuse",))):
        events = folder / f"prefix-{name}"
        with served(asked, events, *options) as url:
            ask_in_turn(asked, url, events)
        rows.append(prefix_row(name, events))
    return rows


def ask_in_turn(asked: argparse.Namespace, url: str, events: Path) -> None:
    text = PromptText(asked.seed)
    contract = from_shorthand(PATIENT)
    with httpx.Client(transport=ReceiptTransport(events, contract), timeout=60) as client:
        for number in range(asked.prefix_requests):
            # Every prompt has words of its own, from places of the text that lie apart.
            prompt = text.cut(asked.prefix, 0) + text.cut(asked.own, 1000 * (number + 1))
            body = {"model": asked.model, "prompt": prompt.decode(), "max_tokens": 8, "stream": True}
            client.post(f"{url}/v1/completions", json=body).raise_for_status()


def prefix_row(name: str, events: Path) -> Row:
    with questions(events, from_shorthand(PATIENT)) as session:
        (kv,) = session.run("kv_usage", bucket_s=WHOLE_S).rows
        ttft_s = quantile_of(session, "ttft", "p50")
        return {
            "prefix_reuse": name,
            "prompt_tokens": kv["prefill_tokens"] + kv["reused_tokens"],
            "run": kv["prefill_tokens"],
            "reused": kv["reused_tokens"],
            "reused_share": rounded(kv["reused_share"], 3),
            "ttft_p50_ms": None if ttft_s is None else round(ttft_s * 1e3, 1),
        }


def main(arguments: list[str] | None = None) -> int:
    parser = served_options(__doc__)
    parser.add_argument("--part", default="all", choices=["all", "reservation", "prefix"], help="(default: all)")
    parser.add_argument("--requests", type=int, default=100, help="of a trace (default: 100)")
    parser.add_argument("--rounds", type=int, default=3, help="a trace of its own each (default: 3)")
    parser.add_argument("--rate", type=float, default=80, help="requests per second (default: 80)")
    parser.add_argument(
        "--lengths",
        default="prompt_p50=8&prompt_sigma=0.5&output_p50=28&output_sigma=0.6",
        help="as in a synthetic trace (default: medians of 8 and 28 tokens)",
    )
    parser.add_argument("--max-tokens", type=int, default=160, help="that every request asks for (default: 160)")
    parser.add_argument("--kv-blocks", type=int, default=160, help="of the pool (default: 160)")
    parser.add_argument("--block-tokens", type=int, default=8, help="of a block (default: 8)")
    parser.add_argument("--max-batch", type=int, default=32, help="(default: 32)")
    parser.add_argument("--prefix-requests", type=int, default=24, help="(default: 24)")
    parser.add_argument("--prefix", type=int, default=384, help="words of the common beginning (default: 384)")
    parser.add_argument("--own", type=int, default=32, help="words of its own (default: 32)")
    asked = parser.parse_args(arguments)
    counts = (
        "requests",
        "rate",
        "max_tokens",
        "kv_blocks",
        "block_tokens",
        "max_batch",
        "prefix_requests",
        "prefix",
        "own",
    )
    positive(parser, asked, *counts)
    rows: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory(prefix="sloscope-kv-") as folder:
        if asked.part != "prefix":
            rows["reservation"] = reservation_rows(asked, Path(folder))
            pool = f"{asked.kv_blocks} KV blocks of {asked.block_tokens} tokens"
            title = f"{asked.rounds} rounds of {asked.requests} requests, max_tokens {asked.max_tokens}, {pool}"
            print_rows(rows["reservation"], asked.format, title=title)
        if asked.part != "reservation":
            rows["prefix"] = prefix_rows(asked, Path(folder))
            title = f"{asked.prefix_requests} requests, one after the other, {asked.prefix} words in common"
            print_rows(rows["prefix"], asked.format, title=title)
    save(asked.save, "kv_reservation", rows, **options_of(asked))
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
