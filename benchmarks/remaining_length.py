"""What a length table is worth to admission and to KV: the same overload with `--lengths` off and on.

An earlier load, in which everybody is let in, leaves three things: the length table (`sloscope query survival_curve`),
the cost model of a step (`sloscope model fit`), and the median first token, which becomes the limit on it, so that it
means the same on any machine. Then another load of the same kind, with the same requests each time:

- off: deadline admission counts an answer as long as its `max_tokens`, and `--reservation full` promises that;
- on: both go by the table (`--lengths`, `--reservation estimate`).

Every second request is `urgent`, with the limit; good, late (let in, and the first token came after the limit) and
refused are of those. The others are `patient` and never refused, so that predictions can be held to what came even
where admission would refuse all that it thinks late: errors are realised - predicted first token, of what was said at
arrival to those who were let in (`sloscope query admission_calibration`). `python -m benchmarks.remaining_length`.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.admission import calibration
from benchmarks.kept import options_of, save
from benchmarks.load import synthetic
from benchmarks.served import (
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
from sloscope.contract import Contract, load
from sloscope.demo.processes import ask
from sloscope.output import print_rows

URGENT, PATIENT_CLASS = "urgent", "patient"
FEWEST = 6  # requests of which `sloscope query quantiles` gives a median


def contract_of(ttft_ms: int) -> str:
    return f"""
version = 1
default_class = "{PATIENT_CLASS}"
[classes.{URGENT}]
ttft = "{ttft_ms}ms"
[classes.{PATIENT_CLASS}]
e2e = "600s"
"""


def rows_of(asked: argparse.Namespace, folder: Path) -> tuple[int, list[Row]]:
    """The limit in ms, and a row for each server."""
    drawn = synthetic(asked.rate, asked.requests / asked.rate, asked.lengths)
    early, late = folder / "early.jsonl", folder / "late.jsonl"
    write_trace(early, drawn, asked.seed + 1, asked.max_tokens, (URGENT, PATIENT_CLASS))
    write_trace(late, drawn, asked.seed, asked.max_tokens, (URGENT, PATIENT_CLASS))
    pool = ("--kv-blocks", str(asked.kv_blocks), "--max-batch", str(asked.max_batch))

    events, unlimited = folder / "earlier", folder / "unlimited.toml"
    unlimited.write_text(contract_of(600_000), encoding="utf-8")
    with served(asked, events, *pool) as url:
        replay(early, url, events, asked.seed + 1, unlimited)
    lengths, cost, promised = folder / "lengths.json", folder / "cost.json", folder / "contract.toml"
    lengths.write_text(survival_curve(events), encoding="utf-8")
    ask("model", "fit", "--events", str(events), "--out", str(cost))
    ttft_ms = median_ttft_ms(events, load(unlimited))
    promised.write_text(contract_of(ttft_ms), encoding="utf-8")
    rows = [row_of("earlier load, all let in", "-", events, load(promised))]
    deadline = ("--admission", "deadline", "--cost-model", str(cost), "--contract", str(promised))
    for name, options in (
        ("off", ("--reservation", "full")),
        ("on", ("--reservation", "estimate", "--lengths", str(lengths))),
    ):
        events = folder / name
        with served(asked, events, *pool, *deadline, *options) as url:
            replay(late, url, events, asked.seed, promised)
        rows.append(row_of("deadline", name, events, load(promised)))
    return ttft_ms, rows


def median_ttft_ms(events: Path, contract: Contract) -> int:
    with questions(events, contract) as session:
        ttft_s = quantile_of(session, "ttft", "p50")
    assert ttft_s is not None, "no median"
    return max(1, round(ttft_s * 1e3))


def row_of(admission: str, lengths: str, events: Path, contract: Contract) -> Row:
    with questions(events, contract) as session:
        (kv,) = session.run("kv_usage", bucket_s=WHOLE_S).rows
        urgent = [row for row in session.run("requests").rows if row["class"] == URGENT]
        errors = calibration(session.run("admission_calibration").rows)
        mean, _ = at_once(session)
    return {
        "admission": admission,
        "lengths": lengths,
        "urgent": len(urgent),
        "good": sum(row["qualified"] for row in urgent),
        "late": sum(row["outcome"] == "completed" and not row["qualified"] for row in urgent),
        "refused": sum(row["reason"] == "rejected" for row in urgent),
        **errors,
        "at_once_mean": rounded(mean, 1),
        "steps": kv["steps"],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = served_options(__doc__)
    parser.add_argument("--requests", type=int, default=160, help="of each load (default: 160)")
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
        ttft_ms, rows = rows_of(asked, Path(folder))
    title = f"{asked.requests} requests at {asked.rate:g} a second, max_tokens {asked.max_tokens}, ttft {ttft_ms} ms"
    print_rows(rows, asked.format, title=title)
    save(asked.save, "remaining_length", {"real": rows}, **options_of(asked), ttft_ms=ttft_ms)
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
