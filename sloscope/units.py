"""Durations, addresses and windows as people type them."""

import re
from datetime import UTC, datetime
from decimal import Decimal

from sloscope.errors import ConfigError

NS_PER = {
    "ns": 1,
    "us": 1_000,
    "µs": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
    "d": 86_400_000_000_000,
}
NS_PER_S = NS_PER["s"]
# Bounds under which the sum of a wall time and a duration fits the 64 bits of a column.
_MAX_DURATION_NS = 36_500 * NS_PER["d"]
_FIRST_YEAR, _LAST_YEAR = 1900, 2150
_DURATION = re.compile(r"^\s*([0-9]*\.?[0-9]+)\s*(ns|us|µs|ms|s|m|h|d)\s*$")


def parse_duration_ns(text: str, field: str = "duration") -> int:
    """`300ms` → 300_000_000. The value must be a whole number of nanoseconds above zero."""
    match = _DURATION.match(text) if isinstance(text, str) else None
    if match is None:
        raise ConfigError(f"{field}: {text!r} is not a duration; accepted: a number with ns, us, ms, s, m, h or d")
    ns = Decimal(match[1]) * NS_PER[match[2]]
    if ns != int(ns) or ns <= 0:
        raise ConfigError(f"{field}: {text!r} must be above zero and a whole number of nanoseconds")
    if ns > _MAX_DURATION_NS:
        raise ConfigError(f"{field}: {text[:40]!r} is no usable duration; accepted: up to 36500d")
    return int(ns)


def format_ns(ns: int | None) -> str:
    """The shortest exact spelling: 300_000_000 → `300ms`. None → `-`."""
    if ns is None:
        return "-"
    for unit in ("d", "h", "m", "s", "ms", "us"):
        if ns and ns % NS_PER[unit] == 0:
            return f"{ns // NS_PER[unit]}{unit}"
    return f"{ns}ns"


def parse_address(text: str, field: str = "address") -> tuple[str, int]:
    """`8000`, `:8000` or `host:8000`; without a host the loopback address is meant."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not (port.isascii() and port.isdigit() and len(port) <= 5) or int(port) > 65535:
        raise ConfigError(f"{field}: {text!r} is not an address; accepted: HOST:PORT or PORT (0 to 65535)")
    return host, int(port)


def parse_instant_ns(text: str, field: str = "time") -> int:
    """ISO 8601 to wall nanoseconds since the epoch; a time without a zone is UTC."""
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ConfigError(f"{field}: {text!r} is not ISO 8601; accepted: 2026-01-31T12:00:00Z") from None
    if not _FIRST_YEAR <= moment.year <= _LAST_YEAR:
        raise ConfigError(f"{field}: {text!r} is out of range; accepted: the years {_FIRST_YEAR} to {_LAST_YEAR}")
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    whole = int(moment.replace(microsecond=0).timestamp())
    return whole * NS_PER_S + moment.microsecond * 1000


def parse_window(text: str, field: str = "window") -> tuple[int, int]:
    """`A..B` or `A+10m` to (start, end) in wall nanoseconds, end excluded."""
    if ".." in text:
        left, _, right = text.partition("..")
        start, end = parse_instant_ns(left, field), parse_instant_ns(right, field)
    else:
        # The last plus sign followed by a duration; an ISO offset (+02:00) is no duration.
        left, plus, length = text.rpartition("+")
        if not plus or not _DURATION.match(length):
            raise ConfigError(f"{field}: {text!r} is not a window; accepted: START..END or START+10m")
        start = parse_instant_ns(left, field)
        end = start + parse_duration_ns(length, field)
    if end <= start:
        raise ConfigError(f"{field}: {text!r} ends before it starts")
    return start, end


def format_instant(wall_ns: int) -> str:
    """Wall nanoseconds to ISO 8601 in UTC with milliseconds."""
    seconds, rest = divmod(wall_ns, NS_PER_S)
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S") + f".{rest // 1_000_000:03d}Z"
