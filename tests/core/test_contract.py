"""Loading, refusing, hashing, resolving contracts."""

import json
import re

import pytest

from sloscope import catalogue
from sloscope import contract as c
from sloscope.errors import ContractError
from sloscope.units import NS_PER

MS = NS_PER["ms"]
BASE = """
version = 1
default_class = "interactive"
[classes.interactive]
ttft = "300ms"
itl_max = "30ms"
"""


def test_what_is_not_written_has_the_documented_default() -> None:
    contract = c.parse(BASE)
    row = contract.classes["interactive"]
    assert (row.limits.ttft_ns, row.limits.itl_max_ns, row.limits.min_tokens) == (300 * MS, 30 * MS, 1)
    assert (contract.observer, contract.window_rule, contract.voluntary) == ("client", "drain", "separate")
    assert contract.drain_limit_ns == 600 * NS_PER["s"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("version = 2\n[classes.a]\nttft='1s'", ["version", "2", "accepted: 1"]),
        ("version = 1", ["classes", "at least one"]),
        (BASE.replace("300ms", "300"), ["classes.interactive.ttft", "'300'", "duration"]),
        (BASE.replace("300ms", "-5ms"), ["classes.interactive.ttft", "'-5ms'"]),
        (BASE.replace('"300ms"', "300"), ["classes.interactive.ttft", "300", "duration"]),
        (BASE + "objective = 1.5", ["classes.interactive.objective", "1.5", "between 0 and 1"]),
        (BASE + 'itl = "3ms"', ["classes.interactive.itl", "itl_max"]),
        (BASE + 'streaming = "optional"', ["classes.interactive.e2e"]),
        (BASE + 'streaming = "maybe"', ["classes.interactive.streaming", "required, optional"]),
        (BASE + "min_tokens = -1", ["min_tokens", "-1"]),
        (BASE.replace('"interactive"', '"other"'), ["default_class", "'other'", "interactive"]),
        ('observer = "router"\n' + BASE, ["observer", "'router'", "client, sidecar, engine"]),
        (BASE + '[window]\nrule = "tumbling"', ["window.rule", "drain, unfinished"]),
        (BASE + '[window]\ndrain = "1s"', ["window.drain"]),
        (BASE + '[cancellation]\nvoluntary = "good"', ["cancellation.voluntary"]),
        (BASE + '[budget]\nwifi = "1ms"', ["budget.wifi", "queue"]),
        (BASE + "[workload]\nprompt_tokens = { p50 = 10, p90 = 5 }", ["workload.prompt_tokens", "not falling"]),
        ("version = 1\n[classes.a]\n", ["classes.a", "at least one of"]),
        ("version = 1\n[classes._a]\nttft='1s'", ["classes._a", "underscore"]),
        ("version = ", ["not TOML"]),
    ],
)
def test_a_bad_contract_names_field_value_and_what_is_accepted(text: str, parts: list[str]) -> None:
    with pytest.raises(ContractError) as caught:
        c.parse(text, "file.toml")
    line = str(caught.value)
    assert "\n" not in line and line.startswith("file.toml: ")
    for part in parts:
        assert part in line, line


def test_shorthand_means_milliseconds_and_adds_nothing() -> None:
    limits = c.from_shorthand("ttft:300 tpot:50 e2el:10000").classes["default"].limits
    assert limits.declared() == {"ttft": 300 * MS, "tpot": 50 * MS, "e2e": 10_000 * MS}
    assert c.from_shorthand("itl_max:30.5").classes["default"].limits.itl_max_ns == 30_500_000


@pytest.mark.parametrize("text", ["", "ttft", "ttft:", "ttft:-1", "speed:3", "ttft:1 ttft:2", "ttft:nan", "ttft:1e3"])
def test_bad_shorthand_is_refused(text: str) -> None:
    with pytest.raises(ContractError):
        c.from_shorthand(text)


def test_the_hash_is_of_canonical_json_and_moves_with_every_limit() -> None:
    contract = c.parse(BASE)
    reordered = c.parse(BASE.replace('ttft = "300ms"\nitl_max = "30ms"', 'itl_max = "0.03s"\nttft = "300000us"'))
    assert contract.hash == reordered.hash and len(contract.hash) == 64
    assert json.loads(contract.canonical())["classes"]["interactive"]["ttft_ns"] == 300 * MS
    assert contract.relaxed("itl_max", 80 * MS).hash != contract.hash


def test_relaxing_changes_one_limit_and_refuses_one_that_is_not_promised() -> None:
    relaxed = c.parse(BASE).relaxed("itl_max", 80 * MS)
    assert relaxed.classes["interactive"].limits.declared() == {"ttft": 300 * MS, "itl_max": 80 * MS}
    with pytest.raises(ContractError, match="no class promises 'tpot'"):
        c.parse(BASE).relaxed("tpot", 1)


def test_a_request_carries_limits_and_a_class() -> None:
    contract = c.parse(BASE)
    own = c.resolve(contract, {"x-slo-ttft-ms": "150", "x-slo-e2e-ms": "2500.5"})
    assert own.class_name == "interactive" and own.known
    assert own.limits.ttft_ns == 150 * MS and own.limits.itl_max_ns == 30 * MS
    assert own.own == {"ttft_ns": 150 * MS, "e2e_ns": 2_500_500_000}
    with pytest.raises(ContractError, match="x-slo-ttft-ms"):
        c.resolve(contract, {"x-slo-ttft-ms": "soon"})


def test_an_unknown_class_is_unknown_and_not_the_default() -> None:
    resolved = c.resolve(c.parse(BASE), {"x-slo-class": "gold"})
    assert (resolved.class_name, resolved.known) == ("_unknown", False)


@pytest.mark.parametrize("name", [*c.PRESETS, "exercise"])
def test_presets_load_and_have_a_sheet_with_every_obligation(name: str) -> None:
    contract = c.preset(name)
    rows = c.sheet(contract)
    assert len(rows) == 9 and all(row.owner and row.policy and row.starts and row.exposed_by for row in rows)


@pytest.mark.parametrize("limit", [*c.LIMIT_NAMES, "min_tokens"])
def test_whatever_a_contract_promises_stands_in_one_row_of_its_sheet(limit: str) -> None:
    value, said = ("7", "7") if limit == "min_tokens" else ("'1234ms'", "1234ms")
    rows = c.sheet(c.parse(f"version = 1\n[classes.gold]\n{limit} = {value}"))
    assert [row.limit.partition(";")[0] for row in rows if said in row.limit] == [f"{limit}: gold {said}"]
    assert sum("not promised" in row.limit for row in rows) == len(c.LIMIT_NAMES) + (limit == "min_tokens")


def test_a_missing_file_is_one_line() -> None:
    with pytest.raises(ContractError, match=r"contract 'nowhere.toml': cannot be read: No such file"):
        c.load("nowhere.toml")


def test_a_count_that_no_column_holds_and_a_value_nested_without_end_are_refused_in_one_line() -> None:
    for line, says in (("min_tokens = " + "9" * 30, "min_tokens"), ("tpot = " + "[" * 5000 + "]" * 5000, "nested")):
        with pytest.raises(ContractError, match=says):
            c.parse(BASE.replace('itl_max = "30ms"', f'itl_max = "30ms"\n{line}'))


@pytest.mark.parametrize("observer", c.OBSERVERS)
def test_a_sheet_names_metrics_that_are_exposed_where_the_promise_is_measured(observer: str) -> None:
    rows = c.sheet(c.parse(f'observer = "{observer}"\n{BASE}'))
    named = [re.findall(r"sloscope_\w+", row.exposed_by) for row in rows]
    for name in (name for names in named for name in names):
        catalogue.get(name)
    others = {f"sloscope_{other}_" for other in c.OBSERVERS if other not in (observer, "engine")}
    of_limits = [name for names in named[:6] for name in names]
    assert of_limits and not [name for name in of_limits if name.startswith(tuple(others))]
