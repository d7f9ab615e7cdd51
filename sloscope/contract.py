"""The SLO contract: what was promised, to whom, measured where, over which window.

`load` reads TOML, `from_shorthand` the `ttft:300 itl_max:30` spelling (milliseconds) that vLLM made
common. Everything is validated before anything starts; an error names the field, the value and what is accepted.
"""

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from sloscope.errors import ConfigError, ContractError
from sloscope.units import NS_PER, NS_PER_S, format_ns, parse_duration_ns

LIMIT_NAMES = ("ttft", "ttft_visible", "itl_max", "tpot", "e2e")
OBSERVERS = ("client", "sidecar", "engine")
UNKNOWN_CLASS = "_unknown"
LIMIT_HEADERS = {
    "x-slo-ttft-ms": "ttft",
    "x-slo-ttft-visible-ms": "ttft_visible",
    "x-slo-itl-max-ms": "itl_max",
    "x-slo-tpot-ms": "tpot",
    "x-slo-e2e-ms": "e2e",
}
CLASS_HEADER = "x-slo-class"
# The spellings of other tools: vLLM says e2el, SGLang and GuideLLM e2e.
_SHORTHAND = {
    "ttft": "ttft",
    "ttft_visible": "ttft_visible",
    "itl_max": "itl_max",
    "tpot": "tpot",
    "e2el": "e2e",
    "e2e": "e2e",
}
PRESETS = ("voice", "editor", "background")
_BUDGET_LINKS = (
    "dispatch", "network_out", "sidecar", "front_end", "queue", "prefill", "first_emission", "network_back",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper limits in ns (`<=` meets them); None: not promised. `min_tokens` is a lower limit on a completed
    answer.
    """

    ttft_ns: int | None = None
    ttft_visible_ns: int | None = None
    itl_max_ns: int | None = None
    tpot_ns: int | None = None
    e2e_ns: int | None = None
    min_tokens: int = 1

    def declared(self) -> dict[str, int]:
        """Limit name without unit → ns, only what is promised."""
        return {name: value for name in LIMIT_NAMES if (value := getattr(self, f"{name}_ns")) is not None}

    def as_record(self) -> dict[str, int]:
        """The form that a `begin` record carries."""
        return {f"{name}_ns": ns for name, ns in self.declared().items()} | {"min_tokens": self.min_tokens}

    def overridden(self, own: Mapping[str, int]) -> "Limits":
        """These limits with a request's own ones (field name → ns) in their place."""
        return replace(self, **own) if own else self


@dataclass(frozen=True, slots=True)
class RequestClass:
    name: str
    limits: Limits
    objective: float = 0.99
    period_ns: int = 30 * NS_PER["d"]
    streaming: str = "required"  # or "optional": a request that did not stream is judged by e2e alone


@dataclass(frozen=True, slots=True)
class Contract:
    classes: Mapping[str, RequestClass]
    default_class: str
    observer: str = "client"
    window_rule: str = "drain"  # or "unfinished"
    drain_limit_ns: int = 600 * NS_PER_S
    grace_ns: int = 0
    voluntary: str = "separate"  # or "excluded"
    budget: Mapping[str, int] = field(default_factory=dict)  # link → ns
    workload: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def canonical(self) -> str:
        """Sorted keys, integers of ns, no spaces: the text that is hashed."""
        body = {
            "version": 1,
            "observer": self.observer,
            "default_class": self.default_class,
            "window": {
                "rule": self.window_rule,
                "drain_limit_ns": self.drain_limit_ns,
                "grace_ns": self.grace_ns,
            },
            "cancellation": {"voluntary": self.voluntary},
            "budget": dict(self.budget),
            "workload": {name: dict(values) for name, values in self.workload.items()},
            "classes": {
                name: row.limits.as_record()
                | {"objective": row.objective, "period_ns": row.period_ns, "streaming": row.streaming}
                for name, row in self.classes.items()
            },
        }
        return json.dumps(body, sort_keys=True, separators=(",", ":"))

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.canonical().encode()).hexdigest()

    def relaxed(self, limit: str, ns: int) -> "Contract":
        """A sensitivity run: this contract with one limit changed in every class that promises it."""
        if limit not in LIMIT_NAMES:
            raise ContractError(f"limit: {limit!r} is unknown; accepted: {', '.join(LIMIT_NAMES)}")
        if not any(limit in row.limits.declared() for row in self.classes.values()):
            raise ContractError(f"limit: no class promises {limit!r}, so there is nothing to change")
        changed = {
            name: replace(row, limits=replace(row.limits, **{f"{limit}_ns": ns}))
            if limit in row.limits.declared()
            else row
            for name, row in self.classes.items()
        }
        return replace(self, classes=changed)

    def limit_edges_ns(self, limit: str) -> list[int]:
        """Every declared value of this limit, for histogram edges."""
        return sorted({ns for row in self.classes.values() if (ns := row.limits.declared().get(limit)) is not None})


@dataclass(frozen=True, slots=True)
class Resolved:
    """What one request was promised."""

    class_name: str
    limits: Limits
    own: Mapping[str, int]  # field name → ns, what the request carried itself
    known: bool  # False: the class is not in the contract, and nothing can qualify


def resolve(contract: Contract, headers: Mapping[str, str]) -> Resolved:
    """Class and limits of a request from its headers (names in lower case).

    Raises ContractError for a limit that is not a positive number of milliseconds. An unknown class is no error
    here: who may refuse does so on `known`, the sidecar forwards it under `_unknown`.
    """
    name = headers.get(CLASS_HEADER) or contract.default_class
    row = contract.classes.get(name)
    own = own_limits(headers)
    if row is None:
        return Resolved(UNKNOWN_CLASS, Limits().overridden(own), own, known=False)
    return Resolved(name, row.limits.overridden(own), own, known=True)


def own_limits(headers: Mapping[str, str]) -> dict[str, int]:
    """The limits that a request carries itself: field name → ns. Raises ContractError as `resolve` does."""
    return {
        f"{limit}_ns": _milliseconds(text, header)
        for header, limit in LIMIT_HEADERS.items()
        if (text := headers.get(header)) is not None
    }


def _milliseconds(text: str, where: str) -> int:
    try:
        return parse_duration_ns(f"{text.strip()}ms", where)
    except ConfigError:
        raise ContractError(
            f"{where}: {text[:40]!r} is not accepted; accepted: a positive number of milliseconds"
        ) from None


def load(path: str | Path) -> Contract:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ContractError(f"contract {str(path)!r}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ContractError(f"contract {str(path)!r}: is not UTF-8 text") from None
    return parse(text, str(path))


def preset(name: str) -> Contract:
    """One of the contracts that ship as examples: voice, editor, background; and `exercise`, 300 ms / 30 ms."""
    if name not in (*PRESETS, "exercise"):
        raise ContractError(f"preset: {name!r} is unknown; accepted: {', '.join((*PRESETS, 'exercise'))}")
    text = resources.files("sloscope").joinpath("presets", f"{name}.toml").read_text(encoding="utf-8")
    return parse(text, f"preset {name}")


def preset_text(name: str) -> str:
    preset(name)
    return resources.files("sloscope").joinpath("presets", f"{name}.toml").read_text(encoding="utf-8")


def from_shorthand(text: str) -> Contract:
    """`ttft:300 tpot:50 e2el:10000`, milliseconds; nothing that is not written is added."""
    limits: dict[str, Any] = {}
    for item in text.replace(",", " ").split():
        name, colon, value = item.partition(":")
        if not colon or name not in _SHORTHAND:
            raise ContractError(
                f"goodput: {item!r} is not accepted; accepted: {', '.join(_SHORTHAND)} as name:milliseconds"
            )
        if f"{_SHORTHAND[name]}_ns" in limits:
            raise ContractError(f"goodput: {name!r} is given twice")
        limits[f"{_SHORTHAND[name]}_ns"] = _milliseconds(value, f"goodput {name}")
    if not limits:
        raise ContractError("goodput: '' promises nothing; accepted: for example 'ttft:300 itl_max:30'")
    return Contract(classes={"default": RequestClass("default", Limits(**limits))}, default_class="default")


def parse(text: str, where: str = "contract") -> Contract:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ContractError(f"{where}: not TOML: {error}") from None
    except RecursionError:
        raise ContractError(f"{where}: not accepted: values are nested too deeply") from None
    return _Reader(where).contract(document)


class _Reader:
    """Walks the document and raises at the first thing that is not accepted."""

    def __init__(self, where: str) -> None:
        self.where = where

    def fail(self, path: str, value: object, accepted: str) -> ContractError:
        return ContractError(f"{self.where}: {path}: {value!r} is not accepted; accepted: {accepted}")

    def table(self, parent: Mapping[str, Any], name: str, path: str, known: tuple[str, ...]) -> Mapping[str, Any]:
        value = parent.get(name, {})
        if not isinstance(value, dict):
            raise self.fail(path, value, "a table")
        for key in value:
            if known and key not in known:
                raise self.fail(f"{path}.{key}" if path else key, value[key], f"only {', '.join(known)}")
        return value

    def duration(self, table: Mapping[str, Any], name: str, path: str) -> int | None:
        if name not in table:
            return None
        value = table[name]
        try:
            return parse_duration_ns(value, path)
        except ConfigError:
            raise self.fail(path, value, 'a duration above zero such as "300ms"') from None

    def choice(self, table: Mapping[str, Any], name: str, path: str, accepted: tuple[str, ...], default: str) -> str:
        value = table.get(name, default)
        if value not in accepted:
            raise self.fail(path, value, ", ".join(accepted))
        return str(value)

    def contract(self, document: Mapping[str, Any]) -> Contract:
        known = (
            "version",
            "observer",
            "default_class",
            "classes",
            "window",
            "cancellation",
            "budget",
            "workload",
        )
        for key in document:
            if key not in known:
                raise self.fail(key, document[key], f"only {', '.join(known)}")
        if document.get("version") != 1 or isinstance(document.get("version"), bool):
            raise self.fail("version", document.get("version"), "1")
        classes = self.classes(document)
        default_class = document.get("default_class", next(iter(classes)) if len(classes) == 1 else None)
        if default_class not in classes:
            raise self.fail("default_class", default_class, ", ".join(classes))
        window = self.table(document, "window", "window", ("rule", "drain_limit", "grace"))
        cancellation = self.table(document, "cancellation", "cancellation", ("voluntary",))
        return Contract(
            classes=classes,
            default_class=default_class,
            observer=self.choice(document, "observer", "observer", OBSERVERS, "client"),
            window_rule=self.choice(window, "rule", "window.rule", ("drain", "unfinished"), "drain"),
            drain_limit_ns=self.duration(window, "drain_limit", "window.drain_limit") or 600 * NS_PER_S,
            grace_ns=self.duration(window, "grace", "window.grace") or 0,
            voluntary=self.choice(
                cancellation, "voluntary", "cancellation.voluntary", ("separate", "excluded"), "separate"
            ),
            budget=self.budget(document),
            workload=self.workload(document),
        )

    def classes(self, document: Mapping[str, Any]) -> dict[str, RequestClass]:
        rows = self.table(document, "classes", "classes", ())
        if not rows:
            raise self.fail("classes", rows, "at least one [classes.NAME] table")
        return {name: self.request_class(rows, name) for name in rows}

    def request_class(self, rows: Mapping[str, Any], name: str) -> RequestClass:
        path = f"classes.{name}"
        if name.startswith("_") or not name:
            raise self.fail(path, name, "a name that does not start with an underscore")
        known = (*LIMIT_NAMES, "min_tokens", "objective", "period", "streaming")
        row = self.table(rows, name, path, known)
        limits = {f"{limit}_ns": self.duration(row, limit, f"{path}.{limit}") for limit in LIMIT_NAMES}
        min_tokens = row.get("min_tokens", 1)
        if not isinstance(min_tokens, int) or isinstance(min_tokens, bool) or not 0 <= min_tokens < 2**31:
            raise self.fail(f"{path}.min_tokens", min_tokens, "a whole number of tokens, 0 or more, below 2^31")
        if not any(limits.values()) and "min_tokens" not in row:
            raise self.fail(path, dict(row), f"at least one of {', '.join((*LIMIT_NAMES, 'min_tokens'))}")
        objective = row.get("objective", 0.99)
        if not isinstance(objective, float) or not 0 < objective < 1:
            raise self.fail(f"{path}.objective", objective, "a share between 0 and 1, such as 0.99")
        streaming = self.choice(row, "streaming", f"{path}.streaming", ("required", "optional"), "required")
        if streaming == "optional" and limits["e2e_ns"] is None:
            raise self.fail(
                f"{path}.e2e",
                None,
                'a duration, since streaming = "optional" judges what did not stream by e2e',
            )
        return RequestClass(
            name=name,
            limits=Limits(**limits, min_tokens=min_tokens),
            objective=objective,
            period_ns=self.duration(row, "period", f"{path}.period") or 30 * NS_PER["d"],
            streaming=streaming,
        )

    def budget(self, document: Mapping[str, Any]) -> dict[str, int]:
        table = self.table(document, "budget", "budget", _BUDGET_LINKS)
        return {link: self.duration(table, link, f"budget.{link}") or 0 for link in table}

    def workload(self, document: Mapping[str, Any]) -> dict[str, dict[str, int]]:
        table = self.table(document, "workload", "workload", ("prompt_tokens", "output_tokens"))
        result: dict[str, dict[str, int]] = {}
        for name in table:
            row = self.table(table, name, f"workload.{name}", ("p50", "p90", "p99"))
            values = [row[q] for q in ("p50", "p90", "p99") if q in row]
            if not all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in values) or values != sorted(
                values
            ):
                raise self.fail(f"workload.{name}", dict(row), "whole numbers of tokens, not falling from p50 to p99")
            result[name] = dict(row)
        return result


@dataclass(frozen=True, slots=True)
class Obligation:
    """A line of the design sheet: who owes what to the person who waits. `policy`: what the reference server does to
    keep it, by flag of `sloscope serve`."""

    obligation: str
    owner: str
    policy: str
    starts: str
    limit: str
    exposed_by: str


_NO_POLICY = "no policy in the engine"


def sheet(contract: Contract) -> list[Obligation]:
    """The design sheet: each obligation with its owner, policy, start, limit and the metric that exposes a miss."""

    def promised(name: str) -> str:
        if name == "min_tokens":
            said = [f"{row.name} {row.limits.min_tokens}" for row in contract.classes.values()]
        else:
            declared = {row.name: row.limits.declared().get(name) for row in contract.classes.values()}
            said = [f"{who} {format_ns(ns)}" for who, ns in declared.items() if ns is not None]
        return f"{name}: {', '.join(said) or 'not promised'}"

    def budget(*links: str) -> str:
        said = [f"{link} {format_ns(contract.budget[link])}" for link in links if link in contract.budget]
        return ", ".join(said) or "no budget"

    at = contract.observer
    zero = "the client sent it" if at == "client" else f"its first byte arrived at the {at}"

    def received(family: str) -> str:
        # The engine has metrics of its work, not of each limit; the question judges its requests like all others.
        return "question misses_by_obligation" if at == "engine" else f"sloscope_{at}_{family}"

    return [
        Obligation(
            "waiting prompt → first token",
            "scheduler: admission and prefill order",
            "--admission deadline, --order edf, --lanes",
            zero,
            f"{promised('ttft')}; {budget('queue', 'prefill')}",
            f"sloscope_{at}_ttft_seconds, sloscope_engine_queue_seconds, sloscope_engine_prefill_seconds",
        ),
        Obligation(
            "waiting prompt → first token that is not reasoning",
            "model: how long it reasons",
            _NO_POLICY,
            zero,
            promised("ttft_visible"),
            received("ttft_visible_seconds"),
        ),
        Obligation(
            "active sequence → next token",
            "scheduler: every iteration it is in the batch",
            "--prefill-slack, or --prefill-tokens",
            "its previous token was computed",
            promised("itl_max"),
            f"{received('itl_max_seconds')}, sloscope_engine_token_interval_seconds",
        ),
        Obligation(
            "active sequence → its tokens at a pace",
            "scheduler: how many share the batch",
            f"{_NO_POLICY}; --max-batch is fixed",
            "its first token came",
            promised("tpot"),
            f"{received('tpot_seconds')}, sloscope_engine_decode_step_seconds",
        ),
        Obligation(
            "request → the end of its answer",
            "scheduler, and the model: how long it answers",
            f"{_NO_POLICY}; it follows from the rows above",
            zero,
            promised("e2e"),
            received("e2e_seconds"),
        ),
        Obligation(
            "answer → long enough",
            "model: when it ends",
            _NO_POLICY,
            "the answer completed",
            promised("min_tokens"),
            received("contract_misses_total"),
        ),
        Obligation(
            "admitted request → room for the KV it will create",
            "KV block pool: reservation or preemption",
            "--reservation",
            "admission",
            "full: never preempted; optimistic, estimate: preempted when the pool is full, and run again",
            "sloscope_engine_kv_blocks, sloscope_engine_preemptions_total",
        ),
        Obligation(
            "sidecar → forward without holding",
            "sidecar data plane",
            "none to choose: every byte goes on as it comes",
            "an event's last byte was read from upstream",
            budget("sidecar"),
            "sloscope_sidecar_added_seconds",
        ),
        Obligation(
            "client → read",
            "the consumer",
            "--max-undelivered, --slow-reader-after",
            "bytes are in its socket",
            "not promised to anyone; recorded apart",
            "sloscope_engine_pauses_total; consumer_hold_ns, loop_lag_max_ns in its records",
        ),
    ]
