"""One journal line to one checked record, fast.

`records.check` is the rule. Here the usual record is recognised with less work, and whatever is not usual goes to
`records.check`, which accepts or names the fault. Lists of stamps become `array('q')`, in which a list that holds
anything but integers does not fit, so that no loop over the elements is needed. Most batches come another way,
`queries.scan`, which takes the lines that are written as recorders write them.
"""

from array import array
from typing import Any, NoReturn

import numpy as np
import orjson

from queries.batches import NULL_NS, NULL_TOKENS, Batch, Columns
from sloscope import records
from sloscope.errors import RecordError
from sloscope.ids import is_request_id

_TYPES = {kind: {f.name: f.type for f in fields} for kind, fields in records.SCHEMA.items()}
_ACCEPTED = {
    kind: {f.name: frozenset(f.accepted) for f in fields if f.accepted} for kind, fields in records.SCHEMA.items()
}
_REQUIRED = {kind: frozenset(f.name for f in fields if f.required) for kind, fields in records.SCHEMA.items()}
_LABEL_TYPES = frozenset((str, int, float, bool))
_LIMITS = frozenset(records.LIMIT_FIELDS)
_STAMPS = {"chunks": "t_ns", "emit": "computed_ns"}
# Each list of a batch: its array's code, and what stands for null where null is accepted.
_LISTS: dict[str, tuple[tuple[str, str, int | None], ...]] = {
    "chunks": (
        ("t_ns", "q", None),
        ("choice", "i", None),
        ("type", "B", None),
        ("tokens", "i", NULL_TOKENS),
        ("forwarded_ns", "q", NULL_NS),
    ),
    "emit": (
        ("choice", "i", None),
        ("cum_tokens", "i", None),
        ("computed_ns", "q", None),
        ("handed_ns", "q", NULL_NS),
        ("written_ns", "q", NULL_NS),
        ("step_id", "q", NULL_NS),
    ),
}
_DTYPES = {"q": np.int64, "i": np.int32, "B": np.int8}
_HEAD_NAMES = len(("v", "kind", "request_id", "ordinal0"))  # all required; `attempt` may stand beside them
_NOT_A_TYPE = bytes(range(len(records.OUTPUT_TYPES)))


def decode(line: bytes) -> records.Record | Batch:
    """The record, and a Batch for `chunks` and `emit`; ValueError when it is not JSON, RecordError when it breaks the
    schema.

    In a Batch null is NULL_NS among stamps and NULL_TOKENS among token counts.
    """
    record = orjson.loads(line)
    if type(record) is not dict:
        return records.check(record)
    kind = record.get("kind")
    if kind == "chunks" or kind == "emit":
        return _batch(kind, record)
    if not _usual(kind, record):
        records.check(record)
    return record


def _usual(kind: Any, record: records.Record) -> bool:
    """Certainly right; False where only `records.check` can tell."""
    types = _TYPES.get(kind) if type(kind) is str else None
    if types is None or record.get("v") != records.VERSION or not _REQUIRED[kind] <= record.keys():
        return False
    for name, value in record.items():
        expected, found = types.get(name), type(value)
        if expected == "int":
            if found is not int or not -(2**63) <= value < 2**63:
                return False
        elif expected == "str":
            if found is not str or len(value) > 1024:
                return False
        elif not (name in ("v", "kind") or (expected is not None and _fits(expected, value))):
            return False
    for name, accepted in _ACCEPTED[kind].items():
        if name in record and record[name] not in accepted:
            return False
    if "outcome" in record and record.get("reason", "") not in records.OUTCOMES[record["outcome"]]:
        return False
    if kind == "begin" and "send_ns" not in record and "arrived_ns" not in record:
        return False
    if kind == "step" and records.misaligned(record):
        return False
    return "request_id" not in record or is_request_id(record["request_id"])


def _fits(expected: str, value: Any) -> bool:
    found = type(value)
    if expected == "strs":
        return found is list and all([type(item) is str or item is None for item in value])
    if expected == "ints":
        return found is list and all([type(item) is int and -(2**63) <= item < 2**63 for item in value])
    if expected == "bool":
        return found is bool
    if expected == "float":
        return found is float or found is int
    if expected == "limits":
        return (
            found is dict
            and value.keys() <= _LIMITS
            and all([type(item) is int and -(2**63) <= item < 2**63 for item in value.values()])
        )
    if expected == "labels":
        return found is dict and all([type(item) in _LABEL_TYPES for item in value.values()])
    return False


def _batch(kind: str, record: dict[str, Any]) -> Batch:
    stamps, request_id = record.get(_STAMPS[kind]), record.get("request_id")
    if not (
        record.get("v") == records.VERSION
        and type(stamps) is list
        and type(request_id) is str
        and is_request_id(request_id)
        and type(record.get("ordinal0")) is int
        and type(record.get("attempt", 0)) is int
        and _REQUIRED[kind] <= record.keys()
    ):
        _refuse(record)
    if not 0 <= record["ordinal0"] < 2**63 or not 0 <= record.get("attempt", 0) < 2**63:
        records.check(record)
        raise RecordError(f"{kind}: ordinal0 and attempt: accepted: 0 or more")
    count, found = len(stamps), _HEAD_NAMES + ("attempt" in record)
    lists = [(name, code, null, record[name]) for name, code, null in _LISTS[kind] if name in record]
    if len(record) != found + len(lists):
        _refuse(record)
    for _, _, _, value in lists:
        if type(value) is not list or len(value) != count:
            _refuse(record)
    arrays: dict[str, array[int] | bytes] = {}
    for name, code, null, value in lists:
        try:
            arrays[name] = array(code, value)
        except (TypeError, OverflowError):
            arrays[name] = _with_nulls(kind, name, code, null, value)
    if kind == "chunks":
        arrays["type"] = types = bytes(arrays["type"])
        if types.translate(None, _NOT_A_TYPE):
            raise RecordError(f"chunks.type: accepted: 0 to {len(records.OUTPUT_TYPES) - 1}")
    values = {name: np.frombuffer(arrays[name], dtype=_DTYPES[code]) for name, code, _, _ in lists if name != "step_id"}
    return Batch(request_id, record.get("attempt", 0), record["ordinal0"], 0, count, Columns(count, values))


def _refuse(record: dict[str, Any]) -> NoReturn:
    """Raises what `records.check` has against it."""
    records.check(record)
    raise AssertionError("records.check accepts a batch that decode does not know")


def _with_nulls(kind: str, name: str, code: str, null: int | None, values: list[Any]) -> "array[int]":
    try:
        if null is not None:
            return array(code, [null if value is None else value for value in values])
    except (TypeError, OverflowError):
        pass
    accepted = "integers" if null is None else "integers and nulls"
    raise RecordError(f"{kind}.{name}: expected ints; accepted: {accepted} of {array(code).itemsize * 8} bits")
