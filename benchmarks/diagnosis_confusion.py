"""What was done to a stream against what the diagnosis says of it: the confusion table.

Every run is one answer through real processes: client → sidecar → (nginx or nothing) → reference server. The pace,
the length of the
answer and the place of a stall are drawn from the run's seed. `python -m benchmarks.diagnosis_confusion --runs 50`.
"""

import argparse
import json
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from sloscope.client import ReceiptTransport
from sloscope.demo.processes import Stage, ask
from sloscope.output import message, print_rows
from tests.end_to_end.support import start_nginx, start_server, start_sidecar

# What nginx does by default towards an HTTP/1.0 upstream; the header with which the server asks for none of it is
# ignored.
BUFFERED = "proxy_ignore_headers X-Accel-Buffering;\nproxy_buffering on;"
UNBUFFERED = 'proxy_http_version 1.1;\nproxy_set_header Connection "";\nproxy_buffering off;'
GOODPUT = "ttft:1000 itl_max:100"
ON_TIME = "on_time"
EXPECTED = {
    "direct": ON_TIME,
    "nginx unbuffered": ON_TIME,
    "nginx buffered, answer below 4 KB": "buffered_delivery",
    "nginx buffered, answer above 4 KB": "buffered_delivery",
    "decoder stall of 200 ms": "decoder_stall",
    "decoder stall of 200 ms, nginx unbuffered": "decoder_stall",
}


def run(runs: int, directory: Path, progress: bool = False) -> list[dict[str, Any]]:
    """`runs` seeded answers of each kind. Rows: injected, expected, one column per verdict, burst_reads (buffered
    kinds).
    """
    events = directory / "events"
    bursts: Counter[str] = Counter()
    with Stage(directory) as stage:
        server = start_server(stage, events, "--allow-faults")
        buffering = start_nginx(stage, directory / "nginx-buffered", server, BUFFERED, "nginx-buffered")
        passing = start_nginx(stage, directory / "nginx-unbuffered", server, UNBUFFERED, "nginx-unbuffered")
        sidecars = {
            name: start_sidecar(stage, upstream, events, "--sql-every", "off", goodput=GOODPUT, name=f"sidecar-{name}")[
                0
            ]
            for name, upstream in (("direct", server), ("buffered", buffering), ("unbuffered", passing))
        }
        with httpx.Client(transport=ReceiptTransport(events), timeout=60) as client:
            for seed in range(runs):
                for kind in EXPECTED:
                    if one_answer(client, sidecars, kind, seed):
                        bursts[kind] += 1
                if progress:
                    message(f"run {seed + 1} of {runs}")
    said = ask("query", "request_diagnosis", "--events", str(events), "--goodput", GOODPUT, "--format", "json")
    table = {kind: Counter[str]() for kind in EXPECTED}
    for row in json.loads(said):
        kind, _, _ = row["external_id"].rpartition(" #")
        table[kind][row["verdict"] or ON_TIME] += 1
    verdicts = sorted({verdict for counts in table.values() for verdict in counts})
    return [
        {
            "injected": kind,
            "expected": EXPECTED[kind],
            "runs": sum(counts.values()),
            "right": counts[EXPECTED[kind]],
            **{verdict: counts[verdict] for verdict in verdicts},
            "seen_to_burst": bursts[kind],
        }
        for kind, counts in table.items()
    ]


def one_answer(client: httpx.Client, sidecars: dict[str, str], kind: str, seed: int) -> bool:
    """Streams one answer. True if one read brought several events: the hop was seen to burst."""
    draw = random.Random(f"{kind} {seed}")
    tokens = draw.randint(40, 60) if "above" in kind else draw.randint(9, 13)
    pace_ms = draw.randint(18, 30)
    fault = f"slow={pace_ms}ms"
    if "stall" in kind:
        fault += f",stall=200ms@{draw.randint(4, tokens - 2)}"
    url = sidecars["buffered" if " buffered" in kind else "unbuffered" if "unbuffered" in kind else "direct"]
    body = {"model": "builtin", "messages": [{"role": "user", "content": "go"}], "stream": True, "max_tokens": 200}
    headers = {"x-request-id": f"{kind} #{seed}", "x-sloscope-stop-after": str(tokens), "x-sloscope-fault": fault}
    largest = 0
    with client.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status_code == 200, response.read()
        for data in response.iter_raw():
            largest = max(largest, data.count(b'"content":"'))
    return largest >= 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50, help="seeded answers of each kind (default: 50)")
    parser.add_argument("--format", default="table", help="table, json or csv (default: table)")
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="sloscope-confusion-"))
    try:
        print_rows(run(arguments.runs, directory, progress=True), arguments.format)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
