"""Durations, addresses, windows and ids as people and headers spell them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloscope import units
from sloscope.errors import ConfigError
from sloscope.ids import is_request_id, new_request_id


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("300ms", 300_000_000),
        ("0.3s", 300_000_000),
        ("1us", 1_000),
        ("1 m", 60_000_000_000),
        ("7ns", 7),
        (".5s", 500_000_000),
    ],
)
def test_durations_are_exact_integers(text: str, ns: int) -> None:
    assert units.parse_duration_ns(text) == ns


@pytest.mark.parametrize("text", ["", "300", "ms", "-1s", "0s", "0.5ns", "1e3ms", "1h30m", "١s", None])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="duration"):
        units.parse_duration_ns(text)


@pytest.mark.parametrize("text", ["36501d", "9" * 400 + "d", "99999999999999999999ms"])
def test_a_duration_that_no_column_holds_is_refused(text: str) -> None:
    assert units.parse_duration_ns("36500d") == 36_500 * 86_400 * 10**9  # 3.2e18, below 2**63 = 9.2e18
    with pytest.raises(ConfigError, match="accepted: up to 36500d"):
        units.parse_duration_ns(text)


@pytest.mark.parametrize("text", ["9999-01-01+1s", "0001-01-01..2026-01-01", "2026-01-01..2151-01-01"])
def test_a_window_that_no_column_holds_is_refused(text: str) -> None:
    start, end = units.parse_window("2150-12-31+36500d")
    assert end - start == units.parse_duration_ns("36500d") and end < 2**63
    with pytest.raises(ConfigError, match="accepted: the years 1900 to 2150"):
        units.parse_window(text)


@given(st.integers(1, 10**18))
def test_formatting_a_duration_is_exact(ns: int) -> None:
    assert units.parse_duration_ns(units.format_ns(ns)) == ns


def test_an_address_without_a_host_is_loopback() -> None:
    assert units.parse_address("8000") == ("127.0.0.1", 8000)
    assert units.parse_address("0.0.0.0:80") == ("0.0.0.0", 80)
    assert units.parse_address("[::1]:80") == ("::1", 80)
    for bad in ("", "host", "host:", "1:70000", "a:b", "127.0.0.1:²", "1:" + "9" * 5000):
        with pytest.raises(ConfigError, match="accepted: HOST:PORT"):
            units.parse_address(bad)


def test_windows_take_iso_8601_or_a_length() -> None:
    start = 1_769_817_600 * 10**9  # 2026-01-31T00:00:00Z
    assert units.parse_window("2026-01-31..2026-01-31T00:10:00Z") == (start, start + 600 * 10**9)
    assert units.parse_window("2026-01-31T00:00:00Z+10m") == (start, start + 600 * 10**9)
    assert units.parse_window("2026-01-31T02:00:00+02:00+10m") == (start, start + 600 * 10**9)
    for bad in ("yesterday", "2026-01-31", "2026-01-31..2026-01-30", "2026-01-31T00:00:00+02:00"):
        with pytest.raises(ConfigError, match="window"):
            units.parse_window(bad)
    assert units.format_instant(start + 1_500_000) == "2026-01-31T00:00:00.001Z"


@given(st.integers(0, 2**48 - 1), st.binary(min_size=10, max_size=10))
def test_an_id_is_26_characters_and_sorts_by_time(milliseconds: int, randomness: bytes) -> None:
    text = new_request_id(milliseconds * 1_000_000, randomness)
    assert len(text) == 26 and is_request_id(text)
    if milliseconds:
        assert new_request_id((milliseconds - 1) * 1_000_000, randomness) < text


@pytest.mark.parametrize("text", ["", "x", "8" + "0" * 25, "0" * 25 + "U", "0" * 27, "0" * 26 + "\n"])
def test_what_is_no_id_is_not_believed(text: str) -> None:
    assert not is_request_id(text)
