"""The header of a question: what it asks, what it takes, what it gives. Checked by machine.

    -- question: one sentence that ends in a question mark
    -- grain: what one row is
    -- inputs: views, separated by commas
    -- params:
    --   name  type  unit  default  [min N]  more words are a remark
    -- outputs:
    --   name  type  unit  more words are a remark
    -- rules: ties, boundaries, what is NULL and why
    -- source: paper or page of an estimator

`params` and `outputs` have one line each, words split by blanks; every other entry runs on over lines that start
with `--` and two blanks or more. A param's default is a bare word; `required` means that it must be given and `null`
that SQL gets NULL. `min N` is the smallest number that is accepted. A varchar's unit may list what is accepted:
`class|model|tenant`. `-` is no unit.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sloscope.errors import ConfigError, QueryError
from sloscope.units import parse_duration_ns

TYPES = ("bigint", "double", "varchar", "boolean")
_ENTRIES = ("question", "view", "grain", "inputs", "params", "outputs", "rules", "source")
_ENTRY = re.compile(r"^-- ([a-z]+):\s*(.*)$")
_LITERALS = re.compile(r"'(?:[^']|'')*'|--[^\n]*")
_MINIMUM = re.compile(r"^min (-?[0-9]+)(?:\s+|$)(.*)$")
_PARAM = re.compile(r"\$([a-z_][a-z0-9_]*)")


@dataclass(frozen=True, slots=True)
class Param:
    name: str
    type: str
    unit: str
    default: str
    remark: str = ""
    minimum: int | None = None

    @property
    def required(self) -> bool:
        return self.default == "required"

    @property
    def accepted(self) -> tuple[str, ...]:
        """The values that a varchar may take; empty: any text."""
        return tuple(self.unit.split("|")) if self.type == "varchar" and "|" in self.unit else ()

    def describe(self) -> str:
        says = f"{self.name} ({self.type}" + ("" if self.unit == "-" else f", {self.unit}") + self.from_minimum
        return says + (", required)" if self.required else f", default {self.default})")

    @property
    def from_minimum(self) -> str:
        """As errors and help say it."""
        return "" if self.minimum is None else f", {self.minimum} or more"

    def value(self, given: object) -> int | float | str | bool | None:
        """`given`, which may be text from a command line or a URL, as the declared type.

        A name that ends in `_ns` also takes a duration such as `10ms`.
        """
        if given is None or given == "null":
            if self.default == "null":
                return None
            raise self._refuse(given)
        if self.type == "varchar":
            if not isinstance(given, str) or (self.accepted and given not in self.accepted):
                raise self._refuse(given)
            return given
        if self.type == "boolean":
            if given in (True, "true", False, "false"):
                return given in (True, "true")
            raise self._refuse(given)
        if isinstance(given, bool) or not isinstance(given, (int, float, str)):
            raise self._refuse(given)
        number = self._number(given)
        if self.minimum is not None and number < self.minimum:
            raise self._refuse(given)
        return number

    def _number(self, given: int | float | str) -> int | float:
        if isinstance(given, str) and self.name.endswith("_ns") and not given.lstrip("-").isdigit():
            try:
                return parse_duration_ns(given, self.name)
            except ConfigError as error:
                raise QueryError(str(error)) from None
        try:
            number = int(given) if self.type == "bigint" else float(given)
        except (ValueError, OverflowError):
            raise self._refuse(given) from None
        # NaN and infinity answer no question; 1.5 is no count; BIGINT has 64 bits.
        if number != number or abs(number) == float("inf"):
            raise self._refuse(given)
        if self.type == "bigint" and not -(2**63) <= number < 2**63:
            raise self._refuse(given)
        if self.type == "bigint" and isinstance(given, float) and number != given:
            raise self._refuse(given)
        return number

    def _refuse(self, given: object) -> QueryError:
        if self.accepted:
            accepted = ", ".join(self.accepted)
        else:
            accepted = {"bigint": "a whole number", "double": "a number", "boolean": "true or false"}.get(
                self.type, "text"
            )
            accepted += ("" if self.unit == "-" else f" ({self.unit})") + self.from_minimum
        return QueryError(f"param {self.name}: {str(given)[:60]!r} is not accepted; accepted: {accepted}")


@dataclass(frozen=True, slots=True)
class Output:
    name: str
    type: str
    unit: str
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Header:
    path: Path
    sql: str  # the whole file, header included
    question: str = ""
    view: str = ""
    grain: str = ""
    inputs: tuple[str, ...] = ()
    params: Mapping[str, Param] = field(default_factory=dict)
    outputs: tuple[Output, ...] = ()
    rules: str = ""
    source: str = ""

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def topic(self) -> str:
        return self.path.parent.name

    @property
    def used_params(self) -> frozenset[str]:
        return frozenset(_PARAM.findall(_LITERALS.sub("", self.sql)))

    def values(self, given: Mapping[str, object]) -> dict[str, int | float | str | bool | None]:
        """Every param with its value: the given one or the default. An unknown or missing one is a QueryError."""
        accepted = "; ".join(param.describe() for param in self.params.values()) or "none"
        for name in given:
            if name not in self.params:
                raise QueryError(f"{self.name}: param {str(name)[:60]!r} is unknown; accepted: {accepted}")
        result = {}
        for name, param in self.params.items():
            if name not in given and param.required:
                raise QueryError(f"{self.name}: param {name!r} is missing; accepted: {accepted}")
            result[name] = param.value(given.get(name, param.default))
        return result


def read_header(path: Path) -> Header:
    """Parses the comment block at the top of a file. What does not parse is our bug, hence asserts."""
    sql = path.read_text(encoding="utf-8")
    entries: dict[str, list[str]] = {}
    current: list[str] = []
    for line in sql.splitlines():
        if not line.startswith("--"):
            break
        if match := _ENTRY.match(line):
            assert match[1] in _ENTRIES, f"{path}: unknown header entry {match[1]!r}"
            current = entries.setdefault(match[1], [])
            if match[2]:
                current.append(match[2])
        else:
            current.append(line.removeprefix("--").strip())
    return Header(
        path=path,
        sql=sql,
        params={param.name: param for param in (_param(path, line) for line in entries.get("params", []))},
        outputs=tuple(_output(path, line) for line in entries.get("outputs", [])),
        inputs=tuple(name.strip() for name in " ".join(entries.get("inputs", [])).split(",") if name.strip()),
        **{name: " ".join(entries.get(name, [])) for name in ("question", "view", "grain", "rules", "source")},
    )


def _param(path: Path, line: str) -> Param:
    words: list[Any] = line.split(None, 4)
    assert len(words) >= 4 and words[1] in TYPES, f"{path}: a param is `name type unit default`, got {line!r}"
    param = Param(*words)
    if match := _MINIMUM.match(param.remark):
        assert param.type in ("bigint", "double"), f"{path}: only a number has a minimum, got {line!r}"
        param = replace(param, remark=match[2], minimum=int(match[1]))
    return param


def _output(path: Path, line: str) -> Output:
    words: list[Any] = line.split(None, 3)
    assert len(words) >= 3 and words[1] in TYPES, f"{path}: an output is `name type unit`, got {line!r}"
    return Output(*words)
