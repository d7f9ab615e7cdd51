"""Every expression against a real Prometheus that scraped the real exposition, before any traffic and under it."""

import json
import math
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dashboards import build, rules
from sloscope import catalogue
from sloscope.contract import preset
from sloscope.exposition import MetricStore, Row
from tests.end_to_end.support import need

EXERCISE = preset("exercise")
# Values of labels that expressions ask for by name; every other label gets "x".
LABELS = {
    "class": ("interactive",),
    "outcome": ("completed", "cancelled"),
    "reason": ("voluntary",),
    "limit": ("ttft", "ttft_visible", "itl_max", "tpot", "e2e"),
    "part": ("weights", "kv", "kv_read", "transfer"),
}

# Histograms of foreign engines, which come with their edges.
_OWN_EDGES = [metric for metric in catalogue.METRICS if metric.kind == "histogram" and not metric.buckets]


class Target:
    """Both expositions behind one address; every scrape under traffic brings one more second of it."""

    def __init__(self) -> None:
        self.busy = False
        self.scrapes = 0
        self._lock = threading.Lock()
        self._stores = [MetricStore(process, EXERCISE) for process in ("sidecar", "server")]
        self._children = [
            (store, metric, labels)
            for store, process in zip(self._stores, ("sidecar", "server"), strict=True)
            for metric in catalogue.exposed_by(process)
            if metric.processes[0] == process  # one address: what both expose stands once
            if metric not in _OWN_EDGES
            for labels in label_sets(metric.labels)
        ]
        for store, metric, labels in self._children:
            store.init(metric.name, labels)
            if metric.name == "sloscope_contract_objective_ratio":
                store.set(metric.name, 0.99, labels)
        self._seconds = 0  # of traffic
        self._stores[0].add_source(self._own_edges)
        target = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = target.scrape()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_address[1]}"

    def scrape(self) -> bytes:
        with self._lock:
            self.scrapes += 1
            self._seconds += self.busy
            for store, metric, labels in self._children if self.busy else ():
                self._advance(store, metric, labels)
            return b"".join(store.render() for store in self._stores)

    def _own_edges(self) -> list[Row]:
        """Ten samples a second with the edges of an engine that is not ours."""
        buckets = [(edge, count * self._seconds) for edge, count in (("0.025", 8), ("0.5", 9), ("+Inf", 10))]
        return [
            Row(metric.name, labels, self._seconds, buckets)
            for metric in _OWN_EDGES
            for labels in label_sets(metric.labels)
        ]

    def _advance(self, store: MetricStore, metric: catalogue.Metric, labels: tuple[str, ...]) -> None:
        if metric.kind == "counter":
            # 4 offered, of which 1 qualified and 1 was stopped by its caller.
            store.inc(metric.name, 4 if metric.name.endswith("_requests_offered_total") else 1, labels)
        elif metric.kind == "histogram":
            # Ten samples: 8 at the first limit or below, 1 above it, 1 beyond every edge.
            store.observe_many(metric.name, [10_000_000] * 8 + [400_000_000, 5_000_000_000_000], labels)
        elif metric.name != "sloscope_contract_objective_ratio":
            store.set(metric.name, 1, labels)


def label_sets(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    sets: list[tuple[str, ...]] = [()]
    for name in names:
        sets = [(*head, value) for head in sets for value in LABELS.get(name, ("x",))]
    return sets


class Prometheus:
    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **params: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}?{urllib.parse.urlencode(params)}", timeout=10) as answer:
            return answer.read()

    def values(self, expr: str) -> list[float]:
        body = json.loads(self.get("/api/v1/query", query=expr))
        return [float(series["value"][1]) for series in body["data"]["result"]]


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    made = Target()
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


@pytest.fixture(scope="module")
def prometheus(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    program = need("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 250ms, scrape_timeout: 250ms, evaluation_interval: 500ms}\n"
        f"rule_files: ['{rule_file(folder)}']\n"
        f"scrape_configs: [{{job_name: sloscope, static_configs: [{{targets: ['{target.address}']}}]}}]\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{probe.getsockname()[1]}"
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={config}",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address={listen}",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            made = Prometheus(f"http://{listen}")
            wait(lambda: made.get("/-/ready"), folder / "log")
            yield made
        finally:
            process.terminate()
            process.wait(20)


def rule_file(folder: Path) -> Path:
    """The generated rules, evaluated twice a second: their own intervals would outlast the test."""
    text = build.rule_files()[build.RULE_FILE]
    for interval in ("30s", "2m"):
        text = text.replace(f"interval: {interval}", "interval: 500ms")
    path = folder / "rules.yaml"
    path.write_text(text)
    return path


def wait(what: Any, log: Path | None = None, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if what():
                return
        except OSError:
            pass  # not listening yet
        said = log.read_text()[-500:] if log else ""
        assert time.monotonic() < deadline, f"nothing within {timeout_s} s {said}"
        time.sleep(0.1)


def after(target: Target, scrapes: int) -> None:
    goal = target.scrapes + scrapes
    wait(lambda: target.scrapes >= goal)


# The tests of this module run in the order in which they stand: the traffic begins once.


def test_without_traffic_nothing_is_nan_and_no_share_exists(target: Target, prometheus: Prometheus) -> None:
    after(target, 4)
    answered = 0
    for entry in build.expressions():
        values = prometheus.values(entry.expr)
        answered += bool(values)
        assert all(math.isfinite(value) for value in values), entry
    assert answered > 50  # rates of zero and gauges are values
    for name in (rules.attainment_name("5m"), rules.burn_name("1h"), rules.LIMIT_MET, rules.BEYOND):
        assert prometheus.values(name) == []
    assert prometheus.values("ALERTS") == []


def test_under_traffic_every_expression_has_finite_values(target: Target, prometheus: Prometheus) -> None:
    target.busy = True
    after(target, 12)
    wait(lambda: prometheus.values(rules.burn_name("3d")))
    empty = []
    for entry in (*build.expressions(), *build.expressions(observer="sidecar")):
        values = prometheus.values(entry.expr)
        assert all(math.isfinite(value) for value in values), entry
        if not values:
            empty.append(entry.where)
    assert empty == []


def test_the_shares_are_those_of_the_traffic(target: Target, prometheus: Prometheus) -> None:
    # Per second and class: 4 offered, 1 qualified: 1/4, and 0.75 / 0.01 of the budget.
    assert prometheus.values(rules.attainment_name("5m")) == pytest.approx([0.25])
    assert prometheus.values(rules.burn_name("5m")) == pytest.approx([75])
    # Of ten samples the 8 of 10 ms meet both limits; 400 ms and 5000 s meet neither.
    assert prometheus.values(rules.LIMIT_MET) == pytest.approx([0.8, 0.8])
    # 1 of 10 lies beyond the last edge of all five families, 160 s at most but for e2e's 1280 s.
    assert prometheus.values(rules.BEYOND) == pytest.approx([0.1] * 5)


def test_the_alerts_about_the_burn_are_pending_and_name_their_class(prometheus: Prometheus) -> None:
    wait(
        lambda: prometheus.values('ALERTS{alertname="SloscopeErrorBudgetFastBurn",class="interactive",severity="page"}')
    )
