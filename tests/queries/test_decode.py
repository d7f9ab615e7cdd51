"""The fast way to read a line and `records.check` accept the same lines."""

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queries.batches import Batch
from queries.decode import decode
from sloscope import records
from sloscope.errors import RecordError
from tests.queries.journal_factory import new_id

ULID = new_id(1)
BATCHES = ("chunks", "emit")
INTS = st.sampled_from([0, 1, -1, 2**63 - 1, 2**63, -(2**63)])
ODD: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), INTS, st.just(1.5), st.sampled_from(["", "x", "y" * 1025]), st.just([]), st.just({})
)


def values(field: records.Field, size: int) -> st.SearchStrategy[Any]:
    """Mostly what the field takes. One length for all lists of a record, or nearly."""
    if field.name == "request_id":
        return st.sampled_from([ULID, ULID, ULID, ULID.lower(), "x"])
    sizes = st.sampled_from([size] * 9 + [size + 1])
    counts = sizes.flatmap(lambda n: st.lists(st.integers(0, 2) | st.none(), min_size=n, max_size=n))
    plain: dict[str, st.SearchStrategy[Any]] = {
        "int": INTS,
        "float": st.sampled_from([1, 1.5]),
        "bool": st.booleans(),
        "str": st.sampled_from([*field.accepted, "x"] if field.accepted else ["", "x", "y" * 1024]),
        "strs": st.lists(st.sampled_from(["stop", None, 1]), max_size=2),
        "limits": st.dictionaries(st.sampled_from([*records.LIMIT_FIELDS, "x"]), st.just(5) | ODD, max_size=2),
        "labels": st.dictionaries(st.just("a"), st.sampled_from(["x", 1, 1.5, True, None, [], 2**63]), max_size=1),
        "ints": counts,
    }
    return plain[field.type]


@st.composite
def lines(draw: st.DrawFn, *kinds: str) -> dict[str, Any]:
    kind = draw(st.sampled_from(kinds))
    size = draw(st.integers(0, 3))
    record: dict[str, Any] = {"v": 1, "kind": kind}
    for field in records.SCHEMA[kind]:
        if draw(st.integers(0, 19)) < (19 if field.required else 8):
            record[field.name] = draw(values(field, size))
    if kind in ("end", "late") and draw(st.booleans()):
        outcome = draw(st.sampled_from(sorted(records.OUTCOMES)))
        record |= {"outcome": outcome, "reason": draw(st.sampled_from(records.OUTCOMES[outcome]))}
    if draw(st.integers(0, 9)) == 0:
        record[draw(st.sampled_from([*record, "prompt"]))] = draw(ODD)
    return record


def refused(work: Any, line: Any) -> bool:
    try:
        work(line)
    except RecordError:
        return True
    return False


@settings(max_examples=300, deadline=None)
@given(lines(*(kind for kind in records.SCHEMA if kind not in BATCHES)))
def test_a_line_that_is_no_batch_is_refused_exactly_where_the_schema_refuses_it(record: dict[str, Any]) -> None:
    assert refused(decode, orjson.dumps(record)) == refused(records.check, record), record


@settings(max_examples=200, deadline=None)
@given(lines(*BATCHES))
def test_a_batch_that_the_schema_refuses_is_refused_and_one_of_known_stamps_is_taken(record: dict[str, Any]) -> None:
    taken = not refused(decode, orjson.dumps(record))
    if refused(records.check, record):
        assert not taken, record
    # The schema lets a null stand anywhere; a receipt without a stamp, a choice or a type is none.
    elif (
        record["ordinal0"] >= 0
        and record.get("attempt", 0) >= 0
        and not any(
            None in record[name] for name in ("t_ns", "computed_ns", "choice", "type", "cum_tokens") if name in record
        )
    ):
        assert taken, record


def test_a_batch_becomes_columns_in_which_what_is_not_known_has_a_mark() -> None:
    line = {"v": 1, "kind": "chunks", "request_id": ULID, "ordinal0": 0, "t_ns": [5, 9], "choice": [0, 1]}
    batch = decode(orjson.dumps(line | {"type": [0, 2], "tokens": [None, 3], "forwarded_ns": [6, None]}))
    assert isinstance(batch, Batch)
    assert {name: values.tolist() for name, values in batch.columns.values.items()} == {
        "t_ns": [5, 9],
        "choice": [0, 1],
        "type": [0, 2],
        "tokens": [-1, 3],
        "forwarded_ns": [6, -(2**63)],
    }


def test_a_kind_that_is_a_list_is_refused_like_any_other() -> None:
    with pytest.raises(RecordError, match="kind"):
        decode(b'{"v":1,"kind":[]}')


def test_what_is_not_json_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="unexpected"):
        decode(b"{")
