"""What a second attempt does for first tokens when one of three servers is slow, and what it costs.

Three reference servers, each behind all sidecars. On the last one somebody else's long answer runs all the time under
the fault `slow=`: every step there takes that much longer, for whoever is in it. Sidecars without and with hedging get
the same schedule in turns, so that a slow minute of the machine hits all.

TTFT is the client's, from the send, by nearest rank over all rounds. `to_slow`: first attempts that went to the slow
server; the choice by outstanding tokens keeps some away by itself. `hedged`: second requests, `won` of them answered.
`waste_prompt`: prompt tokens sent to losers, by the sidecar; `waste_output`: output tokens with which the losers'
servers had begun to answer, by their journals. `python -m benchmarks.hedging`.
"""

import argparse
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.kept import options_of, save
from benchmarks.served import (
    PATIENT,
    Row,
    positive,
    questions,
    replay,
    rounded,
    run,
    serve,
    served_options,
    write_trace,
)
from sloscope.contract import from_shorthand
from sloscope.definitions import nearest_rank
from sloscope.demo.processes import Stage
from sloscope.journal import Tail, journal_files, read_journal
from sloscope.output import print_rows
from sloscope.records import Record

SERVERS = 3
OFF = "off"


class Sidecar(NamedTuple):
    hedging: str  # off, or the threshold
    events: Path
    url: str
    control: str


@contextmanager
def kept_slow(url: str, model: str, fault: str) -> Iterator[None]:
    """An answer after another whose every step is slow."""
    began, stopped = threading.Event(), threading.Event()
    asked = {"model": model, "prompt": "the river", "max_tokens": 1500, "stream": True, "ignore_eos": True}

    def keep() -> None:
        with httpx.Client(timeout=None) as client:
            while not stopped.is_set():
                headers = {"x-sloscope-fault": fault}
                with client.stream("POST", f"{url}/v1/completions", json=asked, headers=headers) as answer:
                    answer.raise_for_status()
                    for _ in answer.iter_raw():
                        began.set()
                        if stopped.is_set():
                            break

    thread = threading.Thread(target=keep, daemon=True)
    thread.start()
    try:
        assert began.wait(60), "the slow answer does not begin"
        yield
    finally:
        stopped.set()
        thread.join(10)


def start_sidecars(stage: Stage, asked: argparse.Namespace, folder: Path, servers: Sequence[str]) -> list[Sidecar]:
    sidecars = []
    for number, hedging in enumerate((OFF, *asked.hedge_after)):
        events = folder / f"sidecar-{number}"
        options = [word for url in servers for word in ("--upstream", url)]
        if hedging != OFF:
            options += ["--hedge-after", hedging, "--hedge-max-share", str(asked.max_share)]
        child = stage.sloscope(
            f"sidecar-{number}", "sidecar", *options, "--listen", "127.0.0.1:0", "--control", "127.0.0.1:0",
            "--events", str(events), "--goodput", PATIENT, "--sql-every", "off", "--balance", asked.balance,
        )  # fmt: skip
        at = child.wait_for(r"listening on (http://\S+), control on (http://\S+)", 60)
        sidecars.append(Sidecar(hedging, events, at[1], at[2]))
    return sidecars


def records(events: Path, observer: str) -> list[Record]:
    files = [path for path in journal_files(events) if path.parent.name == observer]
    return [record for path in files for record in read_journal(Tail(path))]


def counted(control: str) -> dict[str, float]:
    """Hedging at the sidecar: its requests by result, and `waste`."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{control}/metrics").text):
        for sample in family.samples:
            if sample.name == "sloscope_hedge_requests_total":
                found[sample.labels["result"]] = sample.value
            elif sample.name == "sloscope_hedge_waste_prompt_tokens_total":
                found["waste"] = sample.value
    return found


def row_of(sidecar: Sidecar, servers: Sequence[str], engines: Sequence[Path]) -> Row:
    with questions(sidecar.events, from_shorthand(PATIENT), "client") as session:
        requests = session.run("requests").rows
    ttft = sorted(row["ttft_s"] * 1e3 for row in requests if row["ttft_s"] is not None)
    seen = records(sidecar.events, "sidecar")
    begins = [record for record in seen if record["kind"] == "begin"]
    first = [record for record in begins if not record.get("attempt")]
    second = {record["request_id"]: record for record in begins if record.get("attempt")}
    lost = {
        (record["request_id"], record.get("attempt", 0))
        for record in seen
        if record["kind"] == "end" and record["request_id"] in second and record["outcome"] != "completed"
    }
    computed = 0
    for server, events in zip(servers, engines, strict=True):
        here = {
            record["request_id"]
            for record in begins
            if record["upstream"] == server and (record["request_id"], record.get("attempt", 0)) in lost
        }
        ends = [record for record in records(events, "engine") if record["kind"] == "end"]
        computed += sum(record.get("output_tokens", 0) for record in ends if record["request_id"] in here)
    at_sidecar = counted(sidecar.control)

    def quantile(permille: int) -> float | None:
        return round(ttft[nearest_rank(permille, len(ttft)) - 1], 1) if ttft else None

    return {
        "hedge_after": sidecar.hedging,
        "requests": len(requests),
        "completed": sum(row["outcome"] == "completed" for row in requests),
        "to_slow": rounded(sum(record["upstream"] == servers[-1] for record in first) / len(first), 3),
        "ttft_p50_ms": quantile(500),
        "ttft_p90_ms": quantile(900),
        "ttft_p95_ms": quantile(950),
        "ttft_p99_ms": quantile(990),
        "ttft_max_ms": quantile(1000),
        "hedged": len(second),
        "hedged_share": rounded(len(second) / len(first), 4),
        "won": round(at_sidecar.get("won", 0)),
        "over_share": round(at_sidecar.get("over_share", 0)),
        "waste_prompt": round(at_sidecar["waste"]),
        "waste_output": computed,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = served_options(__doc__)
    parser.add_argument("--slow", default="150ms", help="what a step of the slow server takes more (default: 150ms)")
    parser.add_argument(
        "--hedge-after", nargs="+", default=["p95", "60ms"], help="thresholds to compare with none (default: p95 60ms)"
    )
    parser.add_argument("--max-share", type=float, default=0.2, help="--hedge-max-share (default: 0.2)")
    parser.add_argument("--balance", default="tokens", help="as for `sloscope sidecar` (default: tokens)")
    parser.add_argument("--rate", type=float, default=12, help="requests/s, Poisson (default: 12)")
    parser.add_argument("--requests", type=int, default=150, help="of a round (default: 150)")
    parser.add_argument("--rounds", type=int, default=2, help="of each, in turns (default: 2)")
    asked = parser.parse_args(arguments)
    positive(parser, asked, "rate", "requests", "rounds", "max_share")
    with tempfile.TemporaryDirectory(prefix="sloscope-hedging-") as name:
        folder = Path(name)
        trace = folder / "trace.jsonl"
        lengths = "prompt_p50=48&prompt_sigma=0.5&output_p50=12&output_sigma=0.5"
        write_trace(trace, f"synthetic:poisson?rate={asked.rate:g}&n={asked.requests}&{lengths}", asked.seed, 128)
        engines = [folder / f"engine-{number}" for number in range(SERVERS)]
        with Stage(folder) as stage:
            threads = ("--threads", str(asked.threads), "--allow-faults")
            servers = [serve(stage, asked.model, events, *threads) for events in engines]
            sidecars = start_sidecars(stage, asked, folder, servers)
            with kept_slow(servers[-1], asked.model, f"slow={asked.slow}"):
                for number in range(asked.rounds):
                    first = number % len(sidecars)  # who begins changes, too
                    for sidecar in (*sidecars[first:], *sidecars[:first]):
                        replay(trace, sidecar.url, sidecar.events, asked.seed + number)
                rows = [row_of(sidecar, servers, engines) for sidecar in sidecars]
    title = f"{SERVERS} servers, one with steps {asked.slow} longer; {asked.rate:g} requests/s, {asked.rounds} rounds"
    print_rows(rows, asked.format, title=title)
    save(asked.save, "hedging", {"real": rows}, **options_of(asked))
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
