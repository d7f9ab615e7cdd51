"""A real Prometheus beside a real chain: server, sidecar and replay, judged at the client and at the sidecar.

Counters and SQL read the same requests by different ways. Over one life of the sidecar, with every request over, they
have to agree to the last one; and whatever a panel or a rule asks has an answer.
"""

import itertools
import json
import math
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from dashboards import build, rules
from sloscope import contract as contracts
from sloscope.demo.processes import SLOSCOPE, Child, Stage, ask
from tests.end_to_end.scrapes import POINTS, Scrape, Scraper, promtool_check, scrape
from tests.end_to_end.support import Prometheus, start_server, start_sidecar, until
from tests.exporter.engine_texts import vllm
from tests.reference_server.serving import Conversation

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

# All five limits have a class. They are wide enough for a busy machine; the stall breaks itl_max, and only that.
CONTRACT = """
version = 1
observer = "{observer}"
default_class = "interactive"
[classes.interactive]
ttft = "3s"
itl_max = "600ms"
[classes.bulk]
ttft_visible = "6s"
tpot = "500ms"
e2e = "20s"
objective = 0.9
[cancellation]
voluntary = "excluded"
[budget]
queue = "500ms"
"""
STALL_MS = 1500
REPLAYED, BROKEN, STALLED, BURST = 64, 6, 2, 60
OFFERED = REPLAYED + BROKEN + STALLED + BURST
RATE = 8.0  # requests/s: arrivals over 8 s
SLOTS, WAITING = 4, 24  # of the burst 28 find room at once
UNKNOWN, TOO_LONG = 3, 2  # requests of which no client reports a receipt
DIRECT = 1  # past the sidecar, from a reader that does not read: only the engine knows it

# What has no data while nothing is wrong: a moment is marked only when the data plane came back. The last test brings
# one about.
ONLY_IN_TROUBLE = {"Data plane restarts"}
LENGTHS = [
    {"cohort": "interactive", "tokens": 30, "at_risk": 10, "events": 8, "censored": 2, "survival": 0.2},
    {"cohort": "bulk", "tokens": 40, "at_risk": 5, "events": 5, "censored": 0, "survival": 0.0},
]


@dataclass
class Chain:
    observer: str
    events: Path
    contract: Path
    server: str
    url: str
    control: str
    sidecar: Child
    prometheus: Prometheus
    started_ms: int

    def goodput(self, observer: str) -> dict[str, Any]:
        """By the command, as a person asks."""
        where = ("--events", str(self.events), "--contract", str(self.contract), "--observer", observer)
        (row,) = json.loads(ask("query", "goodput", *where, "--format", "json"))
        return dict(row)

    def question(self, name: str, **params: str) -> list[dict[str, Any]]:
        """By the control plane, as Grafana asks."""
        answer = httpx.get(f"{self.control}/api/q/{name}", params=params, timeout=40)
        assert answer.status_code == 200, answer.text
        rows: list[dict[str, Any]] = answer.json()
        return rows

    def replay(self, trace: str, *options: str, code: int = 0) -> dict[str, Any]:
        """The replay's own report."""
        done = subprocess.run(
            [
                *SLOSCOPE, "replay", trace, "--url", self.url, "--events", str(self.events),
                "--contract", str(self.contract), "--receipts", self.control, "--drain", "40s", "--format", "json",
                *options,
            ],
            capture_output=True, text=True, check=False, timeout=100,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        (row,) = json.loads(done.stdout)
        assert "could not be" not in done.stderr, done.stderr  # neither recorded nor posted
        return dict(row)

    def expressions(self) -> list[build.Expression]:
        """With either receipt point as the dashboards' variable."""
        loaded = contracts.load(self.contract)
        found = [each for point in POINTS for each in build.expressions(loaded, point)]
        return list(dict.fromkeys(found))


@pytest.fixture(scope="module", params=POINTS)
def chain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    observer: str = request.param
    path = tmp_path_factory.mktemp(f"chain-{observer}")
    events, contract = path / "events", path / "contract.toml"
    contract.write_text(CONTRACT.format(observer=observer))
    started_ms = time.time_ns() // 1_000_000
    with Stage(path) as stage, vllm_metrics() as vllm_url:
        lengths, served = path / "lengths.json", path / "served.toml"
        # The server refuses a class that it does not know; the sidecar only counts it as unknown.
        served.write_text(contract.read_text() + '[classes.nobody]\nttft = "3s"\n')
        lengths.write_text(json.dumps(LENGTHS))
        server = start_server(
            stage, events, "--allow-faults", "--max-batch", str(SLOTS), "--max-waiting", str(WAITING), "--calibrate",
            "--contract", str(served), "--admission", "deadline", "--lengths", str(lengths),
            "--send-buffer", "4096", "--slow-reader-after", "1s",
        )  # fmt: skip
        url, control, sidecar = start_sidecar(
            stage, server, events, "--contract", str(contract), "--sql-every", "3s", "--drain", "1s",
            "--engine-metrics", server, "--engine-metrics", vllm_url, "--engine-metrics-every", "1s",
        )  # fmt: skip
        targets = {"sidecar": control, "server": server}
        prometheus = Prometheus(stage, path / "prometheus", targets, rule_file(contract, path))
        yield Chain(observer, events, contract, server, url, control, sidecar, prometheus, started_ms)


@contextmanager
def vllm_metrics() -> Iterator[str]:
    """A stand-in for an engine that tells the time of a whole request, which ours does not. Each poll finds more."""
    polls = itertools.count(1)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = vllm(scale=next(polls)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def rule_file(contract: Path, folder: Path) -> Path:
    """The generated rules, evaluated every second: their own intervals would outlast the test."""
    out = folder / "rules"
    ask("rules", "build", "--contract", str(contract), "--out", str(out))
    text = (out / build.RULE_FILE).read_text()
    for interval in ("30s", "2m"):
        assert f"interval: {interval}" in text
        text = text.replace(f"interval: {interval}", "interval: 1s")
    path = folder / "rules.yaml"
    path.write_text(text)
    return path


def trace_file(path: Path) -> str:
    rows = [
        {
            "at_s": round(index / RATE, 3),
            "prompt_tokens": 12 + index % 9,
            "output_tokens": 12 + index % 24,
            "class": "bulk" if index % 3 == 0 else "interactive",
            "tenant": ("blue", "green")[index % 2],
        }
        for index in range(REPLAYED)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def drive(chain: Chain, folder: Path) -> list[dict[str, Any]]:
    """All the traffic whose consumer reports what it received. The replays' reports."""
    with ThreadPoolExecutor(1) as beside:
        steady = beside.submit(chain.replay, trace_file(folder / "trace.jsonl"), "--cancel-rate", "0.15", "--seed", "3")
        until(lambda: scrape(chain.control).total("sloscope_sidecar_requests_total", outcome="completed") > 5, 30)
        fails = ("--header", "x-sloscope-fault: error@4")
        broken = chain.replay(few(BROKEN, 3), *fails, code=1)  # it says so when every request failed
        stalls = ("--header", f"x-sloscope-fault: stall={STALL_MS}ms@10")
        stalled = chain.replay(few(STALLED, 1), *stalls)
        replayed = [broken, stalled, steady.result()]
    slow = never_read(chain)  # alone, so that no first token is predicted behind it
    until(lambda: scrape(chain.server).total("sloscope_engine_pause_seconds_count", end="slow_reader") == DIRECT, 30)
    slow.close()
    return [*replayed, chain.replay(few(BURST, 2000), "--tenant", "blue")]


def never_read(chain: Chain) -> Conversation:
    """A request to the server itself, since a sidecar's own buffers would read a while for its client."""
    body = {"model": "builtin", "prompt": "the river", "max_tokens": 4000, "stream": True}
    return Conversation(int(chain.server.rpartition(":")[2]), body, {}, receive_buffer=2048)


def few(count: int, rate: float) -> str:
    return f"synthetic:poisson?n={count}&rate={rate}&prompt_p50=10&output_p50=30&output_sigma=0.05"


def settle(chain: Chain, offered: int) -> Scrape:
    """The exposition once every request is over, and Prometheus has it."""

    def settled() -> Scrape | None:
        found = scrape(chain.control)
        over = [found.total(f"sloscope_{point}_inflight_requests") for point in POINTS] == [0, 0]
        return found if over and found.total("sloscope_sidecar_requests_offered_total") == offered else None

    found: Scrape = until(settled, 60, 0.3)
    names = [f"sloscope_{point}_requests_total" for point in POINTS]
    until(lambda: all(chain.prometheus.value(f"sum({name})") == found.total(name) for name in names), 20, 0.3)
    return found


def instant(prometheus: Prometheus, name: str, *by: str) -> Counter[tuple[str, ...]]:
    rows = prometheus.query(f"sum by ({', '.join(by)}) ({name})")
    # A label without a value is no label to Prometheus.
    return Counter({tuple(row["metric"].get(label, "") for label in by): int(float(row["value"][1])) for row in rows})


# The tests of this module run in the order in which they stand, for one chain after the other.


def test_before_traffic_nothing_is_nan_no_share_exists_and_nobody_is_paged(chain: Chain) -> None:
    until(lambda: chain.prometheus.up("sidecar") and chain.prometheus.up("server"), 20)
    until(lambda: (chain.prometheus.value("count_over_time(up{job='server'}[1m])") or 0) >= 4, 20)
    until(lambda: chain.prometheus.query(rules.offered_name("3d")), 20)
    answered = 0
    for entry in chain.expressions():
        values = [float(row["value"][1]) for row in chain.prometheus.query(entry.expr)]
        answered += bool(values)
        assert all(math.isfinite(value) for value in values), entry
    assert answered > 60  # gauges, and rates of zero
    for name in (rules.attainment_name("5m"), rules.burn_name("1h"), rules.LIMIT_MET, rules.BEYOND):
        assert chain.prometheus.query(name) == []
    assert chain.prometheus.query("ALERTS") == []
    for url in (chain.control, chain.server):
        text = scrape(url).text
        assert text and "NaN" not in text
        promtool_check(text)


def test_the_identity_holds_at_every_scrape_and_counters_equal_sql(
    chain: Chain, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Scraper(chain.control) as scraper:
        reports = drive(chain, tmp_path)
        final = settle(chain, OFFERED)
    assert scraper.scrapes > 50 and scraper.with_open["sidecar"] > 10
    for point in POINTS:
        check_counters_equal_sql(chain, final, point, strays=0)
    # What the replays counted on their own is the client's row.
    assert sum(report["qualified"] for report in reports) == final.total("sloscope_client_requests_qualified_total")
    with capsys.disabled():
        print(
            f"\n{chain.observer}: {scraper.scrapes} scrapes checked, {scraper.with_open['sidecar']} with open requests"
        )
        for point in POINTS:
            qualified, offered = (
                final.total(f"sloscope_{point}_requests_{name}_total") for name in ("qualified", "offered")
            )
            row = chain.goodput(point)
            print(f"  {point}: counters {qualified}/{offered}, SQL {row['qualified']}/{row['offered']}")
    # The run had everything in it that the comparison is about.
    for point, reason in (("client", "voluntary"), ("sidecar", "disconnect")):
        ended = final.sums(f"sloscope_{point}_requests_total", "outcome", "reason")
        assert ended["failed", "in_band_error"] == BROKEN
        assert ended["failed", "rejected"] > 0 and ended["cancelled", reason] > 0 and ended["completed", ""] > 50
        assert final.total(f"sloscope_{point}_contract_misses_total", obligation="itl_max") >= STALLED


def check_counters_equal_sql(chain: Chain, final: Scrape, point: str, strays: int) -> None:
    """As integers: by class, by way to end, by obligation missed, and the tokens. Strays: unknown to the client."""
    row = chain.goodput(point)
    unobserved = DIRECT + (strays if point == "client" else 0)
    assert row["unobserved"] == unobserved
    prefix = f"sloscope_{point}_"
    assert (final.total(f"{prefix}requests_qualified_total"), final.total(f"{prefix}requests_offered_total")) == (
        row["qualified"],
        row["offered"] - unobserved,
    )
    for name in ("requests_qualified_total", "requests_offered_total", "requests_total"):
        by = ("outcome", "reason") if name == "requests_total" else ("class",)
        assert instant(chain.prometheus, prefix + name, *by) == final.sums(prefix + name, *by)
    by_class = chain.question("attainment_by_cohort", observer=point, by="class")
    assert final.sums(f"{prefix}requests_offered_total", "class") == Counter(
        {(part["part"],): part["offered"] - part["unobserved"] for part in by_class}
    )
    assert final.sums(f"{prefix}requests_qualified_total", "class") == Counter(
        {(part["part"],): part["qualified"] for part in by_class}
    )
    outcomes = chain.question("outcomes", observer=point)
    by_reason = Counter(
        {(each["outcome"], each["reason"]): each["requests"] for each in outcomes if each["outcome"] != "unobserved"}
    )
    ended = final.sums(f"{prefix}requests_total", "outcome", "reason")
    if point == "sidecar":
        # The client's reason for leaving refines the record; the counter had said `disconnect` by then.
        refined = by_reason.pop(("cancelled", "voluntary"), 0)
        by_reason["cancelled", "disconnect"] += refined
    assert +ended == +by_reason
    missed = Counter(
        {(each["obligation"],): each["missed"] for each in chain.question("misses_by_obligation", observer=point)}
    )
    missed.pop(("unobserved",), None)
    assert +final.sums(f"{prefix}contract_misses_total", "obligation") == +missed
    tokens = final.sums(f"{prefix}output_tokens_total", "qualified")
    assert (tokens["true",], tokens.total()) == (row["qualified_tokens"], row["output_tokens"])


def test_every_panel_rule_and_alert_answers(chain: Chain, capsys: pytest.CaptureFixture[str]) -> None:
    until(lambda: chain.prometheus.query(rules.burn_name("3d")), 20)
    empty, kinds = set(), Counter[str]()
    for entry in chain.expressions():
        values = [float(row["value"][1]) for row in chain.prometheus.query(entry.expr)]
        assert all(math.isfinite(value) for value in values), entry
        kinds[entry.kind] += 1
        if not values:
            empty.add(entry)
    assert {entry.where.rpartition(" / ")[2] for entry in empty} == ONLY_IN_TROUBLE, empty
    with capsys.disabled():
        print(f"  expressions with data: {dict(kinds)}, without: {len(empty)}")


def test_the_recorded_shares_are_those_of_the_run(chain: Chain) -> None:
    """Rates leave out what came with a series' first scrape, so they are near the counted shares and not equal."""
    for class_name in ("interactive", "bulk"):
        for name in (rules.attainment_name("5m"), rules.attainment_name("3d"), rules.excl_voluntary_name("5m")):
            value = chain.prometheus.value(f'{name}{{class="{class_name}"}}')
            assert value is not None and 0 < value <= 1
    assert chain.prometheus.value(f'{rules.offered_name("5m")}{{class="interactive"}}')
    pages = 'ALERTS{alertname="SloscopeErrorBudgetFastBurn",class="interactive",severity="page"}'
    until(lambda: chain.prometheus.query(pages), 20)


def test_every_question_of_a_panel_has_rows(chain: Chain) -> None:
    targets = build.sql_targets()
    assert len(targets) > 10
    now_ms = time.time_ns() // 1_000_000
    for point in POINTS:
        variables = {"${__from}": str(chain.started_ms), "${__to}": str(now_ms + 1000), "${observer}": point}
        for target in targets:
            params = {key: variables.get(value, value) for key, value in target.params.items()}
            assert chain.question(target.path.removeprefix("/api/q/"), **params), (point, target)


def test_a_request_that_no_client_reported_is_unobserved_there_and_counted_at_the_sidecar(chain: Chain) -> None:
    model = httpx.get(f"{chain.url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "stream": True}
    with Scraper(chain.control):
        for _ in range(UNKNOWN):
            answer = httpx.post(f"{chain.url}/v1/chat/completions", json=body, headers={"x-slo-class": "nobody"})
            assert answer.status_code == 200 and "[DONE]" in answer.text, answer.text
        for _ in range(TOO_LONG):
            answer = httpx.post(f"{chain.url}/v1/chat/completions", json=body | {"max_tokens": 10_000_000})
            assert answer.status_code == 400
        strays = UNKNOWN + TOO_LONG
        final = settle(chain, OFFERED + strays)
    unknown = {"class": "_unknown"}
    assert final.total("sloscope_sidecar_requests_offered_total", **unknown) == UNKNOWN
    assert final.total("sloscope_sidecar_requests_qualified_total", **unknown) == 0
    assert final.total("sloscope_sidecar_contract_misses_total", obligation="class", **unknown) == UNKNOWN
    assert final.total("sloscope_sidecar_requests_total", reason="http_error") == TOO_LONG
    for point in POINTS:
        check_counters_equal_sql(chain, final, point, strays)
    for url in (chain.control, chain.server):
        promtool_check(scrape(url).text)


def test_a_data_plane_that_came_back_is_marked_and_alerted(chain: Chain) -> None:
    command = ["pgrep", "-P", str(chain.sidecar.process.pid), "-f", "exporter.data_plane"]
    (pid,) = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    os.kill(int(pid), signal.SIGKILL)
    until(lambda: scrape(chain.control).total("sloscope_data_plane_restarts_total") == 1, 20)
    marks = [entry for entry in chain.expressions() if entry.where.rpartition(" / ")[2] in ONLY_IN_TROUBLE]
    assert marks
    for entry in marks:
        until(lambda expr=entry.expr: chain.prometheus.query(expr), 20)
    until(lambda: chain.prometheus.query('ALERTS{alertname="SloscopeDataPlaneRestarted",alertstate="firing"}'), 20)
    # The new life counts from 0, and the identity holds in it from the first scrape on.
    assert scrape(chain.control).check_identity() == {"client": 0, "sidecar": 0}
