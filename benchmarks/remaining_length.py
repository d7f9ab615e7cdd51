"""What a length table is worth to admission and to KV: the same overload with `--lengths` off and on.

An earlier load, in which everybody is let in, leaves three things: the length table (`sloscope query survival_curve`),
the cost model of a step (`sloscope model fit`), and the median first token, which is taken as the limit on it, so that
it means the same on any machine. Then another load of the same kind, with the same requests each time:

- off: deadline admission counts an answer as long as its `max_tokens`, and `--reservation full` promises that;
- on: both go by the table (`--lengths`, `--reservation estimate`).

`late` were let in and had their first token after the limit; errors are realised - predicted first token, of what was
said at arrival (`sloscope query admission_calibration`). `python -m benchmarks.remaining_length`.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.admission import calibration
from benchmarks.engine_steps import options_of, save
from benchmarks.load import synthetic
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
    survival_curve,
    write_trace,
)
from sloscope.contract import from_shorthand
from sloscope.demo.processes import ask
from sloscope.output import message, print_rows

FEWEST = 6  # requests of which `sloscope query quantiles` gives a median


def rows_of(asked: argparse.Namespace, folder: Path) -> tuple[str, list[Row]]:
    """The contract, and a row for each server."""
    drawn = synthetic(asked.rate, asked.requests / asked.rate, asked.lengths)
    early, late = folder / "early.jsonl", folder / "late.jsonl"
    write_trace(early, drawn, asked.seed + 1, asked.max_tokens)
    write_trace(late, drawn, asked.seed, asked.max_tokens)
    pool = ("--kv-blocks", str(asked.kv_blocks), "--max-batch", str(asked.max_batch))

    events = folder / "earlier"
    with served(asked, events, *pool) as url:
        replay(early, url, events, PATIENT, asked.seed + 1)
    lengths, cost = folder / "lengths.json", folder / "cost.json"
    lengths.write_text(survival_curve(events, PATIENT), encoding="utf-8")
    ask("model", "fit", "--events", str(events), "--out", str(cost))
    goodput = limit_of(events)
    message(f"contract {goodput}: the median first token of the earlier load")
    rows = [row_of("earlier load, all let in", "-", events, goodput)]
    deadline = ("--admission", "deadline", "--cost-model", str(cost), "--goodput", goodput)
    for name, options in (
        ("off", ("--reservation", "full")),
        ("on", ("--reservation", "estimate", "--lengths", str(lengths))),
    ):
        events = folder / name
        with served(asked, events, *pool, *deadline, *options) as url:
            replay(late, url, events, goodput, asked.seed)
        rows.append(row_of("deadline", name, events, goodput))
    return goodput, rows


def limit_of(events: Path) -> str:
    with questions(events, from_shorthand(PATIENT)) as session:
        ttft_s = quantile_of(session, "ttft", "p50")
    assert ttft_s is not None, "no median"
    return f"ttft:{max(1, round(ttft_s * 1e3))}"


def row_of(admission: str, lengths: str, events: Path, goodput: str) -> Row:
    with questions(events, from_shorthand(goodput)) as session:
        (found,) = session.run("goodput").rows
        (kv,) = session.run("kv_usage", bucket_s=WHOLE_S).rows
        outcomes = session.run("outcomes").rows
        requests = session.run("requests").rows
        errors = calibration(session.run("admission_calibration").rows)
        mean, _ = at_once(session)
    return {
        "admission": admission,
        "lengths": lengths,
        "offered": found["offered"],
        "good": found["qualified"],
        "late": sum(row["outcome"] == "completed" and "ttft" in row["misses"].split() for row in requests),
        "refused": sum(row["requests"] for row in outcomes if row["reason"] == "rejected"),
        "at_once_mean": rounded(mean, 1),
        "preemptions": kv["preemptions"],
        **errors,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = served_options(__doc__)
    parser.add_argument("--requests", type=int, default=200, help="of each load (default: 200)")
    parser.add_argument("--rate", type=float, default=60, help="requests per second (default: 60)")
    parser.add_argument(
        "--lengths",
        default="prompt_p50=24&prompt_sigma=0.5&output_p50=28&output_sigma=0.8",
        help="as in a synthetic trace (default: medians of 24 and 28 tokens)",
    )
    parser.add_argument("--max-tokens", type=int, default=320, help="that every request asks for (default: 320)")
    parser.add_argument("--kv-blocks", type=int, default=96, help="of the pool (default: 96, of 32 tokens)")
    parser.add_argument("--max-batch", type=int, default=16, help="(default: 16)")
    asked = parser.parse_args(arguments)
    positive(parser, asked, "requests", "rate", "max_tokens", "kv_blocks", "max_batch")
    if asked.requests < FEWEST:
        parser.error(f"--requests: {asked.requests} is not accepted; accepted: {FEWEST} or more, which have a median")
    with tempfile.TemporaryDirectory(prefix="sloscope-lengths-") as folder:
        goodput, rows = rows_of(asked, Path(folder))
    title = f"{asked.requests} requests at {asked.rate:g} a second, max_tokens {asked.max_tokens}, {goodput}"
    print_rows(rows, asked.format, title=title)
    save(asked.save, "remaining_length", {"real": rows}, **options_of(asked), goodput=goodput)
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
