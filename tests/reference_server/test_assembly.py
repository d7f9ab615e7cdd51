from dataclasses import fields, replace
from pathlib import Path

import pytest

from reference_server.admission import DeadlineAdmission
from reference_server.assembly import PolicyChoice, assemble, declared_gap_bound
from reference_server.cost_model import CostModel
from reference_server.fairness import DeficitRoundRobin, ServiceUnit, VirtualTokenCounter
from reference_server.kv_blocks import BlockPool
from reference_server.orders import EarliestDeadline, Fcfs, Lanes
from reference_server.policies import AdmitAll, Full, Optimistic
from reference_server.prefill_budget import DecodeSlack, Static
from reference_server.remaining import EstimatedReservation
from reference_server.scheduler import Limits
from sloscope.errors import ConfigError

LENGTHS = '[{"cohort": "chat", "tokens": 10, "at_risk": 4, "events": 4, "censored": 0, "survival": 0.0}]'


def test_nothing_chosen_is_first_come_first_served_with_whole_promises_and_prompts() -> None:
    policies, unit, cost, lengths = assemble(PolicyChoice())
    assert [type(part) for part in (policies.order, policies.admission, policies.reservation, policies.budget)] == [
        Fcfs,
        AdmitAll,
        Full,
        Static,
    ]
    assert policies.budget.tokens([], [], 0) is None
    assert unit == ServiceUnit(1, 2) and cost.model is None and lengths is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [("fcfs", Fcfs), ("edf", EarliestDeadline), ("vtc", VirtualTokenCounter), ("drr", DeficitRoundRobin)],
)
def test_orders_stand_alone_or_in_lanes(name: str, kind: type) -> None:
    assert type(assemble(PolicyChoice(order=name)).policies.order) is kind
    assert type(assemble(PolicyChoice(order=name, lanes=("a", "b"))).policies.order) is Lanes


def test_what_an_order_is_told_reaches_it() -> None:
    drr = assemble(PolicyChoice(order="drr", quantum=5)).policies.order
    assert isinstance(drr, DeficitRoundRobin) and drr.quantum == 5
    edf = assemble(PolicyChoice(order="edf", longest_wait_ns=7)).policies.order
    assert isinstance(edf, EarliestDeadline) and edf.longest_wait_ns == 7
    lanes = assemble(PolicyChoice(lanes=("a",), lane_wait_ns=9)).policies.order
    assert isinstance(lanes, Lanes) and lanes.starvation_ns == 9


def test_reservations_and_budgets(tmp_path: Path) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(LENGTHS)
    assert type(assemble(PolicyChoice(reservation="optimistic")).policies.reservation) is Optimistic
    parts = assemble(PolicyChoice(reservation="estimate", lengths=str(file)))
    assert type(parts.policies.reservation) is EstimatedReservation and parts.lengths is not None
    budget = assemble(PolicyChoice(prefill_slack=True, prefill_tokens=8)).policies.budget
    assert isinstance(budget, DecodeSlack) and (budget.minimum, budget.maximum) == (8, 8)
    assert budget.default_gap_ns == 100_000_000


def test_one_level_says_how_much_kv_answers_will_take(tmp_path: Path) -> None:
    """Whoever promises room for an answer and whoever asks whether there will be room count with the same length."""
    file = tmp_path / "lengths.json"
    file.write_text(LENGTHS)
    policies = assemble(
        PolicyChoice(admission="deadline", reservation="estimate", lengths=str(file), length_level=0.75)
    ).policies
    assert isinstance(policies.admission, DeadlineAdmission) and policies.admission.kv_level == 0.75
    assert isinstance(policies.reservation, EstimatedReservation) and policies.reservation.level == 0.75


def test_a_cost_model_is_where_predictions_begin(tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    model = CostModel(1e6, 1e3, 2e3, 1.0)
    file.write_text(model.to_json())
    parts = assemble(PolicyChoice(admission="deadline", cost_model=str(file)))
    assert parts.cost.model == model and type(parts.policies.admission) is DeadlineAdmission


@pytest.mark.parametrize(
    ("choice", "limits", "bound"),
    [
        # Pool of 3 · 16 tokens at 2 units: 96; 4 requests of 1 prompt and 31 output tokens: 252.
        (PolicyChoice(order="vtc"), Limits(4, 32), 2 * 96),
        (PolicyChoice(order="vtc"), Limits(1, 32), 2 * 63),
        (PolicyChoice(order="vtc", reservation="optimistic"), Limits(4, 32), 2 * 252),
        # Paused ones hold a block each: 3 requests at once.
        (PolicyChoice(order="vtc", reservation="optimistic"), Limits(1, 32, max_undelivered=8), 2 * 3 * 63),
        # No request is longer than the pool: 47 output tokens.
        (PolicyChoice(order="vtc", reservation="optimistic"), Limits(1, 512), 2 * 95),
        # The prompt is the dearer part: 31 · 3 + 1.
        (PolicyChoice(order="vtc", unit_prompt=3, unit_output=1), Limits(1, 32), 2 * 94),
        (PolicyChoice(order="drr", quantum=10), Limits(4, 32), 2 * (96 + 10)),
        (PolicyChoice(order="vtc", tenant_weights={"a": 4, "b": 0.5}), Limits(4, 32), 2 * 96 / 0.5),
        # A tenant without a weight of its own has 1.
        (PolicyChoice(order="vtc", tenant_weights={"a": 4}), Limits(4, 32), 2 * 96),
        (PolicyChoice(order="vtc", lanes=("a",)), Limits(4, 32), None),
        (PolicyChoice(order="fcfs"), Limits(4, 32), None),
        (PolicyChoice(order="edf"), Limits(4, 32), None),
    ],
)
def test_the_bound_that_an_engine_declares(choice: PolicyChoice, limits: Limits, bound: float | None) -> None:
    assert declared_gap_bound(assemble(choice).policies, limits, BlockPool(3, 16)) == bound


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        (PolicyChoice(order="lifo"), "--order: 'lifo'; accepted: fcfs, edf, vtc, drr"),
        (PolicyChoice(admission="maybe"), "--admission: 'maybe'; accepted: none, deadline"),
        (PolicyChoice(reservation="half"), "--reservation: 'half'; accepted: full, optimistic, estimate"),
        (PolicyChoice(reservation="estimate"), "'estimate' needs lengths; accepted: together with --lengths FILE"),
        (PolicyChoice(lengths_by="colour"), "--lengths-by: 'colour'; accepted: class, tenant"),
        (PolicyChoice(lengths="/nowhere.json"), "cannot be read"),
        (PolicyChoice(cost_model="/nowhere.json"), "--cost-model: '/nowhere.json'"),
        (PolicyChoice(unit_output=0), "--unit-output: 0; accepted: above 0"),
        (PolicyChoice(unit_prompt=-1), "--unit-prompt: -1; accepted: 0 to 1e+09"),
        (PolicyChoice(order="vtc", tenant_weights={"a": -1}), "--tenant-weights: a: -1"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(choice: PolicyChoice, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        assemble(choice)
    assert text in str(error.value) and "\n" not in str(error.value)


def test_the_journal_names_every_choice_and_of_files_no_directory() -> None:
    names = PolicyChoice(
        order="vtc",
        lanes=("a", "b"),
        tenant_weights={"gold": 4, "free": 0.5},
        lengths="/secret/lengths.json",
        prefill_tokens=64,
        prefill_slack=True,
        cost_model="/secret/cost.json",
    ).names()
    assert names == {
        "order": "vtc",
        "lanes": "a,b",
        "lane_wait": "10s",
        "quantum": 1024,
        "longest_wait": "1m",
        "tenant_weights": "free=0.5,gold=4",
        "admission": "none",
        "admission_doubt": 0.25,
        "reservation": "full",
        "lengths": "lengths.json",
        "lengths_by": "class",
        "length_level": 0.9,
        "prefill": "slack, at most 64",
        "prefill_gap": "100ms",
        "cost_model": "cost.json",
    }


# Other values than the defaults; the service unit has fields of its own in the journal.
OTHERS = PolicyChoice(
    "edf", ("a",), 1, 1, 1, 1, 1, {"a": 2}, "deadline", 0.5, "optimistic", "l", "tenant", 0.5, 1, True, 1, "c"
)


@pytest.mark.parametrize(
    "name", [field.name for field in fields(PolicyChoice) if field.name not in ("unit_prompt", "unit_output")]
)
def test_two_engines_that_differ_in_one_choice_differ_in_the_journal(name: str) -> None:
    other = getattr(OTHERS, name)
    assert replace(PolicyChoice(), **{name: other}).names() != PolicyChoice().names()
