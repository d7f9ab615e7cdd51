import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queries.runner import Session
from reference_server.remaining import EstimatedReservation, Lengths, LengthTable
from reference_server.request import Request
from sloscope.clock import FakeClock
from sloscope.contract import preset
from sloscope.errors import ConfigError
from sloscope.journal import JournalWriter
from tests.command import sloscope
from tests.queries.journal_factory import MS, SECOND, new_id, write_request

# Three answers of 10, 20 and 40 tokens ended by themselves and one was cut off at 20:
#   t 10: 4 at risk, 1 ended            S = 3/4
#   t 20: 3 at risk, 1 ended, 1 cut     S = 3/4 · 2/3 = 1/2
#   t 40: 1 at risk, 1 ended            S = 0
WORKED = [
    {"cohort": "chat", "tokens": 10, "at_risk": 4, "events": 1, "censored": 0, "survival": 0.75},
    {"cohort": "chat", "tokens": 20, "at_risk": 3, "events": 1, "censored": 1, "survival": 0.5},
    {"cohort": "chat", "tokens": 40, "at_risk": 1, "events": 1, "censored": 0, "survival": 0.0},
]
# One of two answers ended at 100, the other was cut off there: half of them are longer, nobody knows how much.
OPEN = [{"cohort": "essay", "tokens": 100, "at_risk": 2, "events": 1, "censored": 1, "survival": 0.5}]


def table(*rows: dict[str, Any]) -> LengthTable:
    return LengthTable.parse(json.dumps(list(rows)))


def test_what_is_left_of_an_answer_is_the_curve_beyond_what_it_has() -> None:
    after_15 = table(*WORKED).remaining("chat", 15, 1000)
    assert (after_15.unresolved, after_15.horizon, after_15.source) == (0.0, 40, "cohort")
    # from 15 half of those left is 3/8: the curve is at 1/2 at 20 and 0 at 40. A third of them ended by 20.
    assert (after_15.quantile(0.5), after_15.quantile(0.9), after_15.quantile(0.3)) == (25, 25, 5)


def test_a_cap_within_the_curve_cuts_every_quantile() -> None:
    capped = table(*WORKED).remaining("chat", 0, 15)
    assert (capped.horizon, capped.unresolved, capped.quantile(0.5), capped.quantile(0.2)) == (15, 0.75, 15, 10)


def test_what_lies_beyond_the_curve_is_counted_at_the_cap() -> None:
    essay = table(*OPEN).remaining("essay", 40, 300)
    # 60 more, and 200 more after that for the half that nobody saw end
    assert (essay.horizon, essay.unresolved) == (100, 0.5)
    assert [essay.quantile(level) for level in (0.4, 0.5, 0.9)] == [60, 60, 260]


def test_a_cohort_without_a_curve_is_read_from_all_of_them_and_then_from_the_cap() -> None:
    both = table(*WORKED, *OPEN)
    stranger = both.remaining("poem", 0, 50)
    assert stranger.source == "pooled"
    # t 10: 6 at risk, 1 ended, S = 5/6; t 20: 5 at risk, 1 ended, 1 cut, S = 2/3; t 40: 3 at risk, 1 ended, S = 4/9
    assert stranger.unresolved == pytest.approx(4 / 9)
    assert [stranger.quantile(level) for level in (0.1, 0.3, 0.5, 0.6)] == [10, 20, 40, 50]
    # Nobody in chat was longer than 40, so of one at 60 only the essays know: 40 more, then half of it to the cap.
    beyond = both.remaining("chat", 60, 200)
    assert (beyond.source, beyond.unresolved, beyond.quantile(0.5), beyond.quantile(0.6)) == ("pooled", 0.5, 40, 140)
    nobody = both.remaining("chat", 100, 250)
    assert (nobody.source, nobody.quantile(0.1), nobody.quantile(0.9)) == ("cap", 150, 150)
    assert (nobody.unresolved, nobody.horizon) == (1, 100)
    assert LengthTable().remaining("chat", 0, 7).quantile(0.5) == 7


def test_a_cohort_named_all_is_the_pooled_one() -> None:
    rows = [row | {"cohort": "all"} for row in WORKED]
    poem = table(*rows, *OPEN).remaining("poem", 0, 1000)
    assert (poem.source, poem.horizon, poem.unresolved) == ("pooled", 40, 0)


def test_nothing_is_pooled_where_somebody_entered_late() -> None:
    # 1 left at 10 of 2 at risk, so 1 would be at risk at 30: another one entered between them.
    late = [
        {"cohort": "chat", "tokens": 10, "at_risk": 2, "events": 1, "censored": 0, "survival": 0.5},
        {"cohort": "chat", "tokens": 30, "at_risk": 2, "events": 2, "censored": 0, "survival": 0.0},
    ]
    chat = table(*late).remaining("chat", 0, 40)
    assert (chat.source, chat.quantile(0.5), chat.quantile(0.6)) == ("cohort", 10, 30)
    assert table(*late).remaining("poem", 0, 40).source == "cap"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "lengths: is not JSON (Expecting value"),
        ('{"meta": {}, "rows": []}', "lengths: dict is not a list of rows; accepted: the JSON of `sloscope query"),
        ("[3]", "lengths: row 1: int is no row; accepted: an object keyed by column"),
        ([{}], "lengths: row 1: cohort: nothing is not accepted; accepted: a text"),
        ([WORKED[0] | {"tokens": -1}], "lengths: row 1: tokens: -1 is not accepted; accepted: a whole number from 0"),
        ([WORKED[0] | {"at_risk": 0}], "lengths: row 1: at_risk: 0 is not accepted; accepted: a whole number from 1"),
        ([WORKED[0] | {"at_risk": True}], "lengths: row 1: at_risk: True is not accepted"),
        ([WORKED[0] | {"events": 5}], "lengths: row 1: events + censored: 5 is not accepted; accepted: 1 to 4"),
        ([WORKED[0] | {"survival": 1.5}], "lengths: row 1: survival: 1.5 is not accepted; accepted: a number from 0"),
        ('[{"cohort": "a", "tokens": 1, "at_risk": 1, "events": 1, "censored": 0, "survival": NaN}]', "survival: nan"),
        ([WORKED[1], WORKED[0]], "lengths: row 2: tokens: 10 is not accepted; accepted: more than 20"),
        (
            [WORKED[0], WORKED[1] | {"survival": 0.8}],
            "lengths: row 2: survival: 0.8 is not accepted; accepted: at most",
        ),
    ],
)
def test_a_table_that_is_none_is_refused_in_one_line(text: Any, says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        LengthTable.parse(text if isinstance(text, str) else json.dumps(text))
    assert says in str(raised.value) and "accepted: " in str(raised.value) and "\n" not in str(raised.value)


@given(
    ends=st.lists(st.tuples(st.integers(0, 60), st.booleans()), min_size=1, max_size=30),
    generated=st.integers(0, 70),
    more=st.integers(1, 80),
)
def test_what_is_said_of_any_answer_stays_between_one_token_and_its_cap(
    ends: list[tuple[int, bool]], generated: int, more: int
) -> None:
    share, rows = 1.0, []
    for tokens in sorted({tokens for tokens, _ in ends}):
        here = [natural for length, natural in ends if length == tokens]
        at_risk = sum(length >= tokens for length, _ in ends)
        share *= 1 - sum(here) / at_risk
        counts = {"at_risk": at_risk, "events": sum(here), "censored": len(here) - sum(here)}
        rows.append({"cohort": "a", "tokens": tokens, "survival": share, **counts})
    known, pooled = (table(*rows).remaining(cohort, generated, generated + more) for cohort in "ab")
    quantiles = [known.quantile(level / 10) for level in range(1, 10)]
    assert quantiles == sorted(quantiles) and 1 <= quantiles[0] <= quantiles[-1] <= more
    assert 0 <= known.unresolved <= 1
    # One cohort alone is all there is.
    assert pooled.unresolved == pytest.approx(known.unresolved) and pooled.quantile(0.9) == quantiles[-1]


def test_kv_is_promised_for_the_length_that_few_answers_exceed() -> None:
    lengths = Lengths(table(*WORKED, *OPEN))
    promise = EstimatedReservation(lengths, level=0.4).promised_tokens
    # 2/3 of the answers still running at 12 are longer than 20, which is more than 3/5; none is longer than 40
    answer = Request("r", [1] * 5, max_tokens=300, output=[2] * 12, request_class="chat")
    assert promise(answer) == 5 + 40
    assert promise(Request("r", [1] * 5, max_tokens=300, request_class="chat")) == 5 + 20
    assert promise(Request("r", [1] * 5, max_tokens=8, request_class="chat")) == 5 + 8  # the cap is the most
    lengths.table = LengthTable()  # as a newer table would take its place
    assert promise(answer) == 5 + 300


def test_a_cohort_is_the_class_or_the_tenant() -> None:
    request = Request("r", [1], max_tokens=50, request_class="essay", tenant="chat")
    assert Lengths(table(*WORKED, *OPEN)).of(request).horizon == 50
    assert Lengths(table(*WORKED, *OPEN), by="tenant").of(request).horizon == 40


# --- the same numbers as SQL

ENDINGS = (
    {"finish_reason": ["stop"]},
    {"finish_reason": ["stop"]},
    {"finish_reason": ["length"]},
    {"outcome": "cancelled", "reason": "disconnect"},
    {"outcome": "failed", "reason": "truncated"},
)
GENERATED, CAPS = (0, 7, 33, 60), (None, 34)


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("lengths")
    with JournalWriter(directory, "client", FakeClock(wall_ns=1_700_000_000 * SECOND)) as writer:
        for number in range(60):
            tokens = 1 + number * number % 61 if number % 3 else 1 + number * 7 % 23
            write_request(
                writer,
                "client",
                new_id(number),
                number * MS,
                [number * MS + 5 * MS],
                begin={"class_": ("chat", "essay")[number % 2], "n_choices": 1, "streaming": True},
                end={"output_tokens": tokens, "token_source": "usage", **ENDINGS[number % 5]},
            )
    return directory


@pytest.fixture(scope="module")
def exported(events: Path) -> LengthTable:
    done = sloscope("query", "survival_curve", "--events", str(events), "--goodput", "ttft:300", "--format", "json")
    assert done.returncode == 0, done.stderr
    return LengthTable.parse(done.stdout)


@pytest.mark.parametrize("by", ["class", "all"])
def test_the_numbers_are_those_of_the_query_on_the_same_recording(events: Path, exported: LengthTable, by: str) -> None:
    compared = 0
    with Session(events, preset("exercise")) as session:
        for generated, cap in product(GENERATED, CAPS):
            rows = session.run("remaining_length", by=by, generated=generated, cap=cap).rows
            assert {row["cohort"] for row in rows} == ({"chat", "essay"} if by == "class" else {"all"})
            for row in rows:
                most = cap or 10_000
                if most <= generated:
                    continue
                # The export has classes only: of all of them together the table makes its own curve.
                left = exported.remaining(row["cohort"], generated, most)
                if row["reason"]:
                    assert left.source != "cohort"
                    continue
                compared += 1
                assert left.source == ("cohort" if by == "class" else "pooled")
                assert left.horizon == row["horizon_tokens"]
                assert left.unresolved == pytest.approx(row["unresolved"], rel=1e-9)
                for level, name in ((0.25, "p25"), (0.5, "median"), (0.75, "p75"), (0.9, "p90")):
                    unknown = most - generated  # beyond the horizon SQL says nothing, and a plan needs a number
                    said = row[f"{name}_tokens"]
                    assert left.quantile(level) == (unknown if said is None else said)
    assert compared >= 6 * (2 if by == "class" else 1)  # up to 33 tokens both know something
