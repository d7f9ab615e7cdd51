"""Which series an expression reads."""

import pytest

from dashboards.selectors import Selector, catalogue_row, selectors
from sloscope.errors import DashboardError


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        ("up", [Selector("up", (), "")]),
        ("sum by (class, le) (rate(a_bucket{x=\"1\",y=~'b.*'}[5m]))", [Selector("a_bucket", ("x", "y"), "5m")]),
        ("sum(a) without (b) / on (c) group_left (d) e", [Selector("a", (), ""), Selector("e", (), "")]),
        ('a{b="c,d{e}"} offset 5m > bool 0', [Selector("a", ("b",), "")]),
        ("clamp_max(x:y:z / (w > 0), 1) unless inf", [Selector("x:y:z", (), ""), Selector("w", (), "")]),
        ("max_over_time(a[1h:5m] @ 1700000000)", [Selector("a", (), "1h:5m")]),
        ("time() - 1e-3", []),
    ],
)
def test_names_labels_and_ranges_are_found(expr: str, expected: list[Selector]) -> None:
    assert list(selectors(expr)) == expected


def test_a_variable_that_nobody_replaced_is_refused() -> None:
    with pytest.raises(DashboardError, match=r"cannot be read at '\$oops\]"):
        list(selectors("rate(a[$oops])"))


def test_an_open_brace_is_refused() -> None:
    with pytest.raises(DashboardError, match="'}' is missing"):
        list(selectors('a{b="c"'))


def test_a_series_of_a_histogram_leads_to_its_row() -> None:
    assert catalogue_row("sloscope_client_ttft_seconds_bucket").name == "sloscope_client_ttft_seconds"
    assert catalogue_row("sloscope_client_requests_total").name == "sloscope_client_requests_total"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("sloscope_client_ttft_seconds", "is a histogram"),
        ("sloscope_client_requests_total_count", "not in the catalogue"),
        ("sloscope_client_ttft_milliseconds_bucket", "not in the catalogue"),
        ("vllm:num_requests_running", "not in the catalogue"),
    ],
)
def test_a_series_that_nothing_exposes_is_refused(name: str, says: str) -> None:
    with pytest.raises(DashboardError, match=says):
        catalogue_row(name)
