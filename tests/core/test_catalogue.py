"""Rules that every row keeps."""

import re

import pytest

from sloscope import catalogue, contract
from sloscope.errors import DashboardError
from sloscope.exposition import MetricStore

ROWS = catalogue.METRICS


@pytest.mark.parametrize("metric", ROWS, ids=lambda m: m.name)
def test_names_units_and_help_follow_the_conventions(metric: catalogue.Metric) -> None:
    assert re.fullmatch(r"sloscope_[a-z0-9_]+", metric.name)
    assert metric.help.endswith(".") and len(metric.help) > 10
    assert (metric.kind == "counter") == metric.name.endswith("_total")
    if metric.kind == "histogram":
        assert metric.name.endswith("_seconds") and list(metric.buckets) == sorted(set(metric.buckets))
    assert "request_id" not in metric.labels and "le" not in metric.labels


def test_a_receipt_value_is_never_published_under_an_engine_name_nor_the_reverse() -> None:
    for metric in ROWS:
        assert (metric.measured_at == "engine") == metric.name.startswith("sloscope_engine_")
        if metric.name.startswith(("sloscope_client_", "sloscope_sidecar_")) and metric.kind == "histogram":
            assert metric.measured_at == metric.name.split("_")[1]


def test_client_and_sidecar_have_the_same_families() -> None:
    def families(point: str) -> set[str]:
        return {m.name.removeprefix(f"sloscope_{point}_") for m in ROWS if m.measured_at == point}

    assert families("client") == families("sidecar") - {"added_seconds", "passthrough_total"}


def test_every_limit_of_a_contract_is_an_edge() -> None:
    loaded = contract.parse(
        "version=1\n[classes.a]\nttft='317ms'\nitl_max='33ms'\ntpot='7ms'\ne2e='9s'\nttft_visible='1700ms'"
    )
    for name, limit in (("ttft", 0.317), ("itl_max", 0.033), ("tpot", 0.007), ("e2e", 9.0), ("ttft_visible", 1.7)):
        assert limit in catalogue.edges(catalogue.receipt("client", f"{name}_seconds"), loaded)
        assert round(limit * 1e9) in catalogue.edges_ns(catalogue.receipt("sidecar", f"{name}_seconds"), loaded)


def test_a_name_that_is_not_in_the_catalogue_is_refused() -> None:
    with pytest.raises(DashboardError, match="'sloscope_client_speed' is not in the catalogue"):
        catalogue.get("sloscope_client_speed")


def test_the_reference_page_names_every_metric() -> None:
    page = catalogue.markdown()
    assert all(f"`{metric.name}`" in page for metric in ROWS)


def test_a_value_that_is_not_known_yet_has_no_series_and_every_other_one_starts_at_zero() -> None:
    store = MetricStore("server")
    text = store.render().decode()
    assert "\nsloscope_engine_kv_blocks_cached 0.0\n" in text
    assert (
        "\nsloscope_engine_ceiling_flops_per_second" not in text and "\nsloscope_engine_lengths_age_seconds" not in text
    )
    store.set("sloscope_engine_ceiling_flops_per_second", 250)
    assert "\nsloscope_engine_ceiling_flops_per_second 250.0\n" in store.render().decode()


def test_no_counter_may_be_absent_since_it_loses_the_increment_with_which_it_appears() -> None:
    assert {metric.kind for metric in ROWS if metric.optional} == {"gauge", "info"}


def test_the_state_of_a_journal_is_exposed_by_every_process_that_writes_one() -> None:
    shared = {metric.name for metric in catalogue.exposed_by("server")} & {
        metric.name for metric in catalogue.exposed_by("sidecar")
    }
    assert shared == {
        *(f"sloscope_journal_{name}_total" for name in ("records", "dropped", "bytes", "late_begins")),
        "sloscope_journal_lag_seconds",
        "sloscope_tenant_overflow_total",
    }
