"""Generated names and edges against the real exposition, character by character."""

import re

from dashboards import build, selectors
from sloscope import catalogue
from sloscope.contract import preset
from sloscope.exposition import MetricStore


def exposed(contract_name: str = "exercise") -> str:
    """Both expositions with one child of every metric."""
    text = ""
    for process in ("sidecar", "server"):
        store = MetricStore(process, preset(contract_name))
        for metric in catalogue.exposed_by(process):
            store.init(metric.name, tuple("interactive" if label == "class" else "x" for label in metric.labels))
        text += store.render().decode()
    return text


def test_every_series_that_is_read_is_in_a_scrape() -> None:
    scraped = set(re.findall(r"^(\w+)", exposed(), re.MULTILINE))
    recorded = {entry.where for entry in build.expressions() if entry.kind == "recording"}
    for observer in ("client", "sidecar"):
        for entry in build.expressions(observer=observer):
            # `up` is Prometheus' own.
            for series in selectors.selectors(entry.expr):
                assert series.name in scraped | recorded | {"up"}, entry


def test_every_edge_that_a_rule_names_is_spelled_as_the_scrape_spells_it() -> None:
    named = set()
    for entry in build.expressions():
        named |= set(re.findall(r'(\w+_bucket)\{[^}]*le="([^"+]+)"', entry.expr))
    # The limits of the contract: 300 ms and 30 ms.
    assert named == {("sloscope_client_ttft_seconds_bucket", "0.3"), ("sloscope_client_itl_max_seconds_bucket", "0.03")}
    scraped = set(re.findall(r'^(\w+_bucket)\{.*le="([^"]+)"', exposed(), re.MULTILINE))
    assert named <= scraped


def test_every_label_that_an_expression_matches_is_in_a_scrape() -> None:
    labels: dict[str, set[str]] = {}
    for name, inside in re.findall(r"^(\w+)\{([^}]*)\}", exposed(), re.MULTILINE):
        labels.setdefault(name, set()).update(re.findall(r'(\w+)="', inside))
    tried = 0
    for entry in build.expressions():
        for series in selectors.selectors(entry.expr):
            if series.labels and ":" not in series.name:
                assert set(series.labels) <= labels[series.name], entry
                tried += 1
    assert tried > 50
