"""Expressions, word by word; and what is refused."""

import pytest

from dashboards import promql
from sloscope.contract import from_shorthand, preset
from sloscope.errors import DashboardError


def test_a_rate_sums_over_everything_that_is_not_asked_for() -> None:
    series = promql.receipt("requests_total", "sidecar").where("outcome", "failed")
    assert promql.per_second(series, ("class",), "5m") == (
        'sum by (class) (rate(sloscope_sidecar_requests_total{outcome="failed"}[5m]))'
    )


def test_a_quantile_drops_the_nan_of_empty_buckets() -> None:
    series = promql.engine("queue_seconds")
    assert promql.quantile(0.99, series) == (
        "histogram_quantile(0.99, sum by (le) (rate(sloscope_engine_queue_seconds_bucket[$__rate_interval]))) >= 0"
    )


def test_a_ratio_asks_for_a_denominator_above_zero() -> None:
    assert promql.ratio("a", "b") == "a / (b > 0)"


def test_attainment_is_qualified_over_offered() -> None:
    offered = "sum by (class) (rate(sloscope_client_requests_offered_total[5m]))"
    qualified = "sum by (class) (rate(sloscope_client_requests_qualified_total[5m]))"
    expected = f"clamp_max(({qualified} or 0 * {offered}) / ({offered} > 0), 1)"
    assert promql.attainment("client", ("class",), "5m", filtered=False) == expected


def test_a_dashboard_filter_names_only_labels_that_the_metric_has() -> None:
    assert promql.receipt("requests_offered_total").filtered().selector() == (
        'sloscope_${observer}_requests_offered_total{class=~"$class",model=~"$model",tenant=~"$tenant"}'
    )
    assert promql.engine("service_units_total").filtered().selector() == (
        'sloscope_engine_service_units_total{tenant=~"$tenant"}'
    )


def test_the_share_beyond_the_last_edge_names_no_edge() -> None:
    series = promql.receipt("ttft_seconds", "client")
    finite = 'sum by (le) (rate(sloscope_client_ttft_seconds_bucket{le!="+Inf"}[5m]))'
    everything = 'sum (rate(sloscope_client_ttft_seconds_bucket{le="+Inf"}[5m]))'
    assert promql.beyond_last_edge(series, (), "5m") == f"1 - max ({finite}) / ({everything} > 0)"


def test_a_limit_is_read_at_the_edge_as_the_exposition_spells_it() -> None:
    contract = from_shorthand("ttft:2000")
    shared = promql.within_limit(promql.receipt("ttft_seconds", "client"), "default", "ttft", contract, "5m")
    assert 'le="2.0"' in shared


def test_a_limit_of_another_family_is_refused() -> None:
    with pytest.raises(DashboardError, match="ttft of class 'interactive' is no bucket edge"):
        promql.within_limit(promql.receipt("icl_seconds", "client"), "interactive", "ttft", preset("exercise"), "5m")


def test_a_label_that_the_metric_lacks_is_refused() -> None:
    with pytest.raises(DashboardError, match="sloscope_engine_requests: has no label 'class'; accepted: state"):
        promql.level(promql.engine("requests"), ("class",))
    with pytest.raises(DashboardError, match="has no label 'le'"):
        promql.engine("requests").where("le", "1.0")


def test_a_metric_outside_the_catalogue_is_refused() -> None:
    with pytest.raises(DashboardError, match="'sloscope_engine_queue_ms' is not in the catalogue"):
        promql.engine("queue_ms")
    with pytest.raises(DashboardError, match="not in the catalogue"):
        promql.receipt("queue_seconds")


def test_a_histogram_is_not_read_without_a_suffix_nor_a_counter_with_one() -> None:
    with pytest.raises(DashboardError, match="histogram has no series"):
        promql.per_second(promql.engine("queue_seconds"))
    with pytest.raises(DashboardError, match="counter has no series 'sloscope_engine_preemptions_total_bucket'"):
        promql.quantile(0.5, promql.engine("preemptions_total"))


@pytest.mark.parametrize(
    ("text", "expected"), [('a"b', r'"a\"b"'), ("a\\b", r'"a\\b"'), ("a\nb", r'"a\nb"'), ("ä", '"ä"')]
)
def test_a_value_stays_text_whatever_is_in_it(text: str, expected: str) -> None:
    assert promql.quoted(text) == expected
