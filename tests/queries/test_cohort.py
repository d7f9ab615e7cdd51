"""The `cohort` view: the verdict of sloscope.definitions, the window rule, and who is in it."""

from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from queries.runner import Session
from sloscope.clock import FakeClock
from sloscope.contract import OBSERVERS, Contract, Limits, RequestClass, from_shorthand, parse, preset
from sloscope.definitions import Summary, judge
from sloscope.journal import JournalWriter
from sloscope.records import OUTCOMES
from tests.queries.cases import expand, session_of, session_over
from tests.queries.journal_factory import new_id, write_request

S = 1_000_000_000
WINDOW = (100 * S, 200 * S)
# Few values, so that ties at a limit are common.
NS = st.sampled_from([2, 3, 4, 6, 9])
MAYBE_NS = st.one_of(NS, NS, st.none())
LIMITS = st.builds(
    Limits,
    ttft_ns=MAYBE_NS,
    ttft_visible_ns=MAYBE_NS,
    itl_max_ns=MAYBE_NS,
    tpot_ns=MAYBE_NS,
    e2e_ns=NS,
    min_tokens=st.sampled_from([0, 1, 2]),
)
VALUES = ("ttft_worst_ns", "ttft_visible_worst_ns", "itl_max_ns", "span_ns", "e2e_ns")


@st.composite
def observer_side(draw):
    outcome = draw(st.sampled_from([*OUTCOMES, "completed", "completed", "completed", None]))
    side = {name: draw(MAYBE_NS) for name in VALUES}
    side["span_tokens"] = draw(st.sampled_from([None, 0, 1, 2, 3, 4]))
    side["tokens"] = draw(st.sampled_from([None, 0, 1, 2, 5]))
    # The best choice's values are not what a contract judges: they differ, and must not matter.
    side["ttft_ns"] = draw(MAYBE_NS)
    side["outcome"] = outcome
    side["reason"] = draw(st.sampled_from(OUTCOMES[outcome])) if outcome else None
    side["end_at_ns"] = draw(st.sampled_from([150 * S, 210 * S, 210 * S + 1])) if outcome else None
    return side


@st.composite
def request_row(draw):
    row = {
        "class": draw(st.sampled_from(["chat", "batch", "_unknown", "typo", None])),
        "streaming": draw(st.booleans()),
        "n_choices": draw(st.integers(1, 3)),
        "arrival_at_ns": draw(st.integers(WINDOW[0], WINDOW[1] - 1)),
    }
    for limit in ("ttft", "ttft_visible", "itl_max", "tpot", "e2e"):
        row[f"own_{limit}_ns"] = draw(st.one_of(st.none(), st.none(), NS))
    for observer in OBSERVERS:
        if draw(st.sampled_from([True, True, False])):
            row[observer] = draw(observer_side())
    return row


CONTRACTS = st.builds(
    lambda chat, batch, streaming, observer: Contract(
        classes={
            "chat": RequestClass("chat", chat, streaming=streaming),
            "batch": RequestClass("batch", batch),
        },
        default_class="batch",
        observer=observer,
        window_rule="unfinished",
        grace_ns=10 * S,
    ),
    LIMITS,
    LIMITS,
    st.sampled_from(["required", "optional"]),
    st.sampled_from(OBSERVERS),
)


def verdict_by_definition(contract, row):
    """(outcome, Verdict) of one row, None for the verdict when its observer has no record."""
    side = row.get(contract.observer)
    if side is None:
        return "unobserved", None
    cut_ns = WINDOW[1] + contract.grace_ns
    outcome = "unfinished" if side["outcome"] is None or side["end_at_ns"] > cut_ns else side["outcome"]
    summary = Summary(tokens=side["tokens"], span_tokens=side["span_tokens"], **{name: side[name] for name in VALUES})
    row_class = contract.classes.get(row["class"] or contract.default_class)
    own = {f"{name}": ns for name in ("ttft_ns", "ttft_visible_ns", "itl_max_ns", "tpot_ns", "e2e_ns")
           if (ns := row[f"own_{name}"]) is not None}  # fmt: skip
    return outcome, judge(
        outcome,
        summary,
        (row_class.limits if row_class else Limits()).overridden(own),
        streamed=row["streaming"],
        streaming=row_class.streaming if row_class else "required",
        class_known=row_class is not None,
    )


def as_table_row(request_id, row):
    result = {"request_id": request_id} | {name: value for name, value in row.items() if name not in OBSERVERS}
    for observer in OBSERVERS:
        result[f"{observer}_observed"] = observer in row
        result |= {f"{observer}_{name}": value for name, value in row.get(observer, {}).items()}
    return result


# No shrinking: one example is a dozen requests, and the message already names the one that differs.
@settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(contract=CONTRACTS, rows=st.lists(request_row(), min_size=12, max_size=25))
def test_the_view_and_the_definitions_give_every_request_the_same_verdict(contract, rows):
    given_rows = [as_table_row(f"r{number:03}", row) for number, row in enumerate(rows)]
    with session_over({"requests": given_rows}, contract, window=WINDOW) as session:
        found = session.sql("select * from cohort order by request_id").rows
    assert len(found) == len(rows)
    for row, judged in zip(rows, found, strict=True):
        outcome, verdict = verdict_by_definition(contract, row)
        assert judged["outcome"] == outcome
        misses = {name.removeprefix("miss_") for name in judged if name.startswith("miss_") and judged[name]}
        if verdict is None:
            assert judged["unobserved"] and not judged["qualified"] and not misses and not judged["vacuous"]
            continue
        assert not judged["unobserved"]
        assert (misses, judged["qualified"], judged["vacuous"]) == (
            set(verdict.misses), verdict.qualified, verdict.vacuous,
        ), (contract, row)  # fmt: skip


def test_the_view_judges_by_the_limit_itself_not_by_one_nanosecond_more():
    def qualified(ttft_ns: int, gap_ns: int) -> bool:
        row = {"id": "A", "client": {"ttft_ns": ttft_ns, "itl_max_ns": gap_ns, "tokens": 9, "outcome": "completed"}}
        with session_of({"given": {"requests": [row]}}) as session:
            return session.sql("select qualified from cohort").rows[0]["qualified"]

    assert qualified(300_000_000, 30_000_000)
    assert not qualified(300_000_001, 30_000_000)
    assert not qualified(300_000_000, 30_000_001)


def test_arrival_decides_the_cohort_and_the_window_end_is_outside():
    rows = [
        {"id": "at start", "arrival_s": 10, "client": {"outcome": "completed"}},
        {"id": "last ns", "arrival_at_ns": 20 * S - 1, "client": {"outcome": "completed", "end_at_ns": 300 * S}},
        {"id": "at end", "arrival_s": 20, "client": {"outcome": "completed"}},
        {"id": "before", "arrival_at_ns": 10 * S - 1, "client": {"outcome": "completed", "end_at_ns": 15 * S}},
        {"id": "warm-up", "arrival_s": 12, "warmup": True, "client": {"outcome": "completed"}},
    ]
    with session_of({"given": {"requests": rows}, "window_s": [10, 20]}) as session:
        found = session.sql("select request_id from cohort order by arrival_at_ns").rows
        warm = session.sql("select request_id from warmup_requests").rows
    assert [row["request_id"] for row in found] == ["at start", "last ns"]
    assert [row["request_id"] for row in warm] == ["warm-up"]


# Arrived at 19 s with stamp 5 s at its start; output events at 19.5, 20.5, 21 and 21.5 s; ended at 22 s.
LATE = {
    "requests": [{"id": "A", "arrival_s": 19, "client": {
        "start_s": 5, "end_s": 8, "tokens": 9, "ttft_ms": 500, "outcome": "completed"}}],
    "chunks": [{"id": "A", "client": {
        "t_ns": [5_500_000_000, 6_500_000_000, 7_000_000_000, 7_500_000_000], "tokens": [2, 3, None, 4]}}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "outcome", "reason", "before_cut"),
    [
        # the cut is 20 + 1 = 21 s: 2 + 3 tokens, and 1 of the event exactly at it, which has no count
        ({"window_rule": "unfinished", "grace_ns": S}, "unfinished", "window_closed", 6),
        # 20 + 0 s: the first event
        ({"window_rule": "unfinished", "grace_ns": 0}, "unfinished", "window_closed", 2),
        # an end exactly at the cut is an end
        ({"window_rule": "unfinished", "grace_ns": 2 * S}, "completed", "", 9),
        ({"window_rule": "drain", "drain_limit_ns": 600 * S}, "completed", "", 9),
        ({"window_rule": "drain", "drain_limit_ns": S}, "unfinished", "window_closed", 6),
    ],
)
def test_what_is_open_at_the_cut_is_unfinished_and_counts_the_tokens_before_it(rule, outcome, reason, before_cut):
    given_rows = {table: [expand(table, row) for row in rows] for table, rows in LATE.items()}
    with session_over(given_rows, replace(preset("exercise"), **rule), window=(0, 20 * S)) as session:
        row = session.sql("select * from cohort").rows[0]
    assert (row["outcome"], row["reason"], row["output_tokens_before_cut"]) == (outcome, reason, before_cut)
    assert row["output_tokens"] == 9


def test_a_whole_answer_that_nobody_counted_has_unknown_tokens_and_keeps_its_contract(tmp_path):
    contract = parse('version = 1\n[classes.a]\nttft = "1s"\ne2e = "1s"\nstreaming = "optional"')
    with JournalWriter(tmp_path, "client", FakeClock(wall_ns=0)) as client:
        whole = {"streaming": False}
        write_request(client, "client", new_id(1), 0, begin=whole, end_ns=S // 2)
        write_request(client, "client", new_id(2), 0, begin=whole, end={"outcome": "failed", "reason": "truncated"})
    with Session(tmp_path, contract, window=(0, S)) as session:
        rows = session.sql(
            "select tokens, token_source, miss_min_tokens, qualified from cohort order by request_id"
        ).rows
        lengths = {row["length"]: row["requests"] for row in session.run("lengths").rows}
    assert [tuple(row.values()) for row in rows] == [(None, None, False, True), (0, "assumed_one", False, False)]
    assert lengths["output_tokens"] == 0


def test_a_scheduled_request_places_its_stamps_by_the_scheduled_arrival():
    # Scheduled at 10 s (stamp 100), sent at stamp 103; an event at stamp 109 came at 19 s, one at 112 at 22 s.
    rows = {
        "requests": [{"id": "A", "arrival_s": 10, "client_intended_ns": 100 * S,
                      "client": {"start_s": 103, "outcome": "open"}}],
        "chunks": [{"id": "A", "client": {"t_ns": [109 * S, 112 * S], "tokens": [5, 7]}}],
    }  # fmt: skip
    given_rows = {table: [expand(table, row) for row in rows[table]] for table in rows}
    contract = replace(preset("exercise"), window_rule="unfinished")
    with session_over(given_rows, contract, window=(0, 20 * S)) as session:
        row = session.sql("select * from cohort").rows[0]
    assert (row["outcome"], row["output_tokens_before_cut"]) == ("unfinished", 5)


def test_an_engine_counts_cumulative_tokens_of_each_choice_before_the_cut():
    rows = {
        "requests": [{"id": "A", "arrival_s": 19, "n_choices": 2, "engine": {"start_s": 0, "outcome": "open"}}],
        "chunks": [{"id": "A", "engine": {
            "computed_ns": [S // 2, S // 2, S, 2 * S], "choice": [0, 1, 0, 1], "cum_tokens": [1, 4, 3, 9]}}],
    }  # fmt: skip
    given_rows = {table: [expand(table, row) for row in rows[table]] for table in rows}
    contract = replace(preset("exercise"), window_rule="unfinished", observer="engine")
    with session_over(given_rows, contract, window=(0, 20 * S)) as session:
        row = session.sql("select * from cohort").rows[0]
    # at 20 s: choice 0 had 3, choice 1 had 4
    assert row["output_tokens_before_cut"] == 7


def test_limits_for_every_class_judge_all_but_the_unknown_class():
    rows = [
        expand("requests", {"id": name, "class": name, "client": {"ttft_ms": 9, "tokens": 1, "outcome": "completed"}})
        for name in ("chat", "voice", "_unknown")
    ]
    contract = from_shorthand("ttft:10")
    with session_over({"requests": rows}, contract, window=(0, S), every_class=True) as session:
        found = session.sql("select class, qualified from cohort order by class").rows
        budget = session.run("error_budget").rows
    assert found == [
        {"class": "_unknown", "qualified": False},
        {"class": "chat", "qualified": True},
        {"class": "voice", "qualified": True},
    ]
    assert [(row["class"], row["offered"]) for row in budget] == [("default", 2)]
    with session_over({"requests": rows}, contract, window=(0, S)) as session:
        assert session.run("goodput").rows[0]["qualified"] == 0
