"""One journal line to one checked record, fast.

`records.check` is the rule. Here the usual record is recognised with less work, and whatever is not usual goes to
`records.check`, which accepts or names the fault. Arrays of stamps become `array('q')`, in which a list that holds
anything but integers does not fit, so that no loop over the elements is needed.
"""

from array import array
from typing import Any

import orjson

from sloscope import records
from sloscope.errors import RecordError
from sloscope.ids import is_request_id

NULL_NS = -(2**63)  # in an array of stamps: not known
NULL_TOKENS = -1  # in an array of token counts: not known

_PYTHON_TYPE: dict[str, type] = {"int": int, "str": str, "bool": bool}
_PLAIN = {
    kind: {f.name: (_PYTHON_TYPE.get(f.type), frozenset(f.accepted) or None) for f in fields}
    for kind, fields in records.SCHEMA.items()
}
_STAMPS = {"chunks": "t_ns", "emit": "computed_ns"}
_OPTIONAL_STAMPS = {"chunks": ("forwarded_ns",), "emit": ("handed_ns", "written_ns", "step_id")}
_TOKENS = {"chunks": "tokens", "emit": "cum_tokens"}
_HEAD = frozenset({"v", "kind", "request_id", "attempt", "ordinal0"})
_BATCH_FIELDS = {kind: frozenset(f.name for f in records.SCHEMA[kind]) | {"v", "kind"} for kind in _STAMPS}
_NOT_A_TYPE = bytes(range(len(records.OUTPUT_TYPES)))


def decode(line: bytes) -> records.Record:
    """The record; ValueError when it is not JSON, RecordError when it breaks the schema.

    In `chunks` and `emit` the lists are replaced: stamps by array('q') with NULL_NS for null, `choice` and tokens by
    array('i') with NULL_TOKENS for null, `type` by bytes.
    """
    record = orjson.loads(line)
    if type(record) is not dict:
        return records.check(record)
    kind = record.get("kind")
    if kind in _STAMPS:
        return _batch(kind, record)
    if not _usual(kind, record):
        records.check(record)
    return record


def _usual(kind: Any, record: records.Record) -> bool:
    """Certainly right; False where only `records.check` can tell."""
    fields = _PLAIN.get(kind) if type(kind) is str else None
    if fields is None or kind in ("begin", "end", "late") or record.get("v") != records.VERSION:
        return False
    for field in records.SCHEMA[kind]:
        if field.required and field.name not in record:
            return False
    for name, value in record.items():
        if name in ("v", "kind"):
            continue
        expected, accepted = fields.get(name, (None, None))
        if expected is str:
            fits = type(value) is str and len(value) <= 1024 and (accepted is None or value in accepted)
        elif expected is int:
            fits = type(value) is int and -(2**63) <= value < 2**63
        else:
            fits = type(value) is expected
        if not fits:
            return False
    request_id = record.get("request_id")
    return request_id is None or is_request_id(request_id)


def _batch(kind: str, record: dict[str, Any]) -> records.Record:
    fields = _BATCH_FIELDS[kind]
    stamps = record.get(_STAMPS[kind])
    request_id = record.get("request_id")
    if not (
        record.get("v") == records.VERSION
        and record.keys() <= fields
        and type(stamps) is list
        and type(request_id) is str
        and is_request_id(request_id)
        and type(record.get("ordinal0")) is int
        and type(record.get("attempt", 0)) is int
    ):
        return _refuse(record)
    if record["ordinal0"] < 0:
        raise RecordError(f"{kind}.ordinal0: expected 0 or more, got {record['ordinal0']}")
    for name in record.keys() - _HEAD:
        if type(record[name]) is not list or len(record[name]) != len(stamps):
            return _refuse(record)
    try:
        return _arrays(kind, record)
    except KeyError as missing:
        raise RecordError(f"{kind}.{missing.args[0]}: is missing") from None


def _refuse(record: dict[str, Any]) -> records.Record:
    """Raises what `records.check` has against it."""
    records.check(record)
    raise AssertionError("records.check accepts a batch that decode does not know")


def _arrays(kind: str, record: dict[str, Any]) -> records.Record:
    record[_STAMPS[kind]] = _integers("q", kind, _STAMPS[kind], record)
    record["choice"] = _integers("i", kind, "choice", record)
    for name in _OPTIONAL_STAMPS[kind]:
        if name in record:
            record[name] = _integers("q", kind, name, record, NULL_NS)
    if kind == "emit" or "tokens" in record:
        null = NULL_TOKENS if kind == "chunks" else None
        record[_TOKENS[kind]] = _integers("i", kind, _TOKENS[kind], record, null)
    if kind == "chunks":
        try:
            record["type"] = bytes(record["type"])
        except (TypeError, ValueError):
            raise RecordError("chunks.type: expected ints") from None
        if record["type"].translate(None, _NOT_A_TYPE):
            raise RecordError(f"chunks.type: accepted: 0 to {len(records.OUTPUT_TYPES) - 1}")
    return record


def _integers(code: str, kind: str, name: str, record: dict[str, Any], null: int | None = None) -> "array[int]":
    values = record[name]
    try:
        return array(code, values)
    except (TypeError, OverflowError):
        pass
    try:
        if null is not None:
            return array(code, [null if value is None else value for value in values])
    except (TypeError, OverflowError):
        pass
    accepted = "integers" if null is None else "integers and nulls"
    raise RecordError(f"{kind}.{name}: expected ints; accepted: {accepted} of {array(code).itemsize * 8} bits")
