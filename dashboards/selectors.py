"""A small PromQL tokenizer: which series an expression reads, with their labels and range.

It knows as much of the grammar as the checks need and no more; promtool and Prometheus judge the rest.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from sloscope import catalogue
from sloscope.errors import DashboardError

_TOKEN = re.compile(
    r"""(?P<space>\s+)
      | (?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
      | (?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?(?:ms|[smhdwy])?)
      | (?P<name>[A-Za-z_:][A-Za-z0-9_:]*)
      | (?P<mark>=~|!~|!=|==|<=|>=|[-+*/%^<>=(){}\[\],@])""",
    re.VERBOSE,
)
_GROUPING = ("by", "without", "on", "ignoring", "group_left", "group_right")
_WORDS = (*_GROUPING, "and", "or", "unless", "offset", "bool", "inf", "nan")
_HISTOGRAM_SUFFIXES = ("_bucket", "_sum", "_count")


class Selector(NamedTuple):
    name: str
    labels: tuple[str, ...]  # that its matchers name
    range: str  # the text in the brackets, "" for an instant selector


def tokens(expr: str) -> list[tuple[str, str]]:
    """Raises DashboardError at the first character that starts no token, such as a variable left unreplaced."""
    found, at = [], 0
    while at < len(expr):
        match = _TOKEN.match(expr, at)
        if match is None:
            raise DashboardError(f"expression {expr!r}: cannot be read at {expr[at : at + 20]!r}")
        if match.lastgroup != "space":
            found.append((str(match.lastgroup), match.group()))
        at = match.end()
    return found


def selectors(expr: str) -> Iterator[Selector]:
    """Every series that the expression reads, left to right."""
    stream = [*tokens(expr), ("end", "")]
    at = 0
    while stream[at][0] != "end":
        kind, text = stream[at]
        at += 1
        if kind != "name":
            continue
        if text.lower() in _GROUPING and stream[at][1] == "(":
            at = _closing(stream, at, ")")
        elif text.lower() in _WORDS or _calls(stream, at):
            continue
        else:
            labels: tuple[str, ...] = ()
            window = ""
            if stream[at][1] == "{":
                end = _closing(stream, at, "}")
                labels = tuple(word for (what, word) in stream[at:end] if what == "name")
                at = end
            if stream[at][1] == "[":
                end = _closing(stream, at, "]")
                window = "".join(word for (_, word) in stream[at + 1 : end - 1])
                at = end
            yield Selector(text, labels, window)


def _calls(stream: list[tuple[str, str]], at: int) -> bool:
    """A function or aggregation: a parenthesis follows, or a grouping as in `sum by (…)`."""
    return stream[at][1] == "(" or stream[at][1].lower() in ("by", "without")


def _closing(stream: list[tuple[str, str]], at: int, mark: str) -> int:
    while stream[at][1] != mark or stream[at][0] != "mark":
        if stream[at][0] == "end":
            raise DashboardError(f"expression: {mark!r} is missing")
        at += 1
    return at + 1


def catalogue_row(name: str) -> catalogue.Metric:
    """The row behind a series name. Raises DashboardError when the exposition has no such series."""
    for suffix in _HISTOGRAM_SUFFIXES:
        family = name.removesuffix(suffix)
        if family != name:
            try:
                metric = catalogue.get(family)
            except DashboardError:
                continue
            if metric.kind == "histogram":
                return metric
    metric = catalogue.get(name)
    if metric.kind == "histogram":
        raise DashboardError(f"metric: {name!r} is a histogram; its series end in {', '.join(_HISTOGRAM_SUFFIXES)}")
    return metric
