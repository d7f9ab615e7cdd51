"""Every journal record: its fields, their types and units, in one place.

A record is a JSON object with `v`, `kind` and, except `clock`, `step` and `engine`, `request_id` + `attempt`. Fields
that are not known are left out. Stamps (`_ns`) are integers of the writing host's monotonic clock. Prompt and output
text have no field here, and unknown fields are refused, so that none can slip in.

A field that may be left out joins without a new version: what was written before it stays readable, and lacks it. The
version changes when a field changes its meaning, is required or, having been written by anybody, goes.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from sloscope.errors import RecordError
from sloscope.ids import is_request_id

VERSION = 1
READABLE_VERSIONS = (1,)

OBSERVERS = ("client", "sidecar", "engine")
ROLES = ("client", "gateway", "router", "sidecar", "server")
OUTPUT_TYPES = ("content", "reasoning", "tool")
# What a control plane takes of a client's own words. A label is a name, and no place for what was said.
MAX_NAME = 200  # characters of a model, tenant or foreign id, as the data plane cuts them
MAX_TOKENS = 2**31 - 1  # as the stream decoder takes them: sums over many must fit a column
MAX_LABELS = 32
MAX_LABEL_TEXT = 256  # characters
TOKEN_SOURCES = ("usage", "continuous_usage", "engine", "tokenizer", "assumed_one")
OUTCOMES: dict[str, tuple[str, ...]] = {
    "completed": ("",),
    "failed": (
        "rejected",
        "http_error",
        "connect_error",
        "in_band_error",
        "truncated",
        "empty_stream",
        "upstream_reset",
        "timeout",
        "bad_stream",
    ),
    "cancelled": ("voluntary", "client_timeout", "disconnect", "slow_reader"),
    "unfinished": ("recorder_lost", "window_closed"),
}
STATES = ("WAITING", "PREFILL", "DECODE", "PAUSED", "PREEMPTED", "FINISHED", "CANCELLED", "REJECTED")


class Field(NamedTuple):
    name: str
    type: str  # int, float, str, bool, limits, labels, ints, strs
    doc: str
    required: bool = False
    accepted: tuple[str, ...] = ()


_REQUEST = (
    Field("request_id", "str", "26-character ULID", required=True),
    Field("attempt", "int", "0, or the number of a hedged attempt of the same request"),
)

SCHEMA: dict[str, tuple[Field, ...]] = {
    "clock": (
        Field("mono_ns", "int", "monotonic reading", required=True),
        Field("wall_ns", "int", "wall reading taken beside it, ns since the epoch", required=True),
        Field("clock_id", "str", "kind:boot id:time namespace", required=True),
    ),
    "begin": (
        *_REQUEST,
        Field("observer", "str", "who stamped", required=True, accepted=OBSERVERS),
        Field("role", "str", "this hop's place in the chain", accepted=ROLES),
        Field("clock_id", "str", "the clock of every stamp of this request", required=True),
        Field("external_id", "str", "the caller's own x-request-id; may repeat"),
        Field("retry_of", "str", "request id that this one retries"),
        Field("intended_ns", "int", "scheduled arrival"),
        Field("send_ns", "int", "client: the call entered the transport"),
        Field("arrived_ns", "int", "sidecar, server: first request byte"),
        Field("body_complete_ns", "int", "sidecar, server: last request byte"),
        Field("model", "str", "model asked for"),
        Field("tenant", "str", "tenant label as sent"),
        Field("class", "str", "request class after defaulting"),
        Field("contract_hash", "str", "SHA-256 of the resolved contract"),
        Field("limits", "limits", "limits in force, ns (min_tokens: tokens)"),
        Field("own_limits", "limits", "the part of them that the request carried itself"),
        Field("streaming", "bool", "asked for server-sent events"),
        Field("n_choices", "int", "choices asked for"),
        Field("prompt_tokens", "int", "prompt length, tokens"),
        Field("max_tokens", "int", "cap on output tokens"),
        Field("stop_after", "int", "natural stop asked of the reference server, tokens"),
        Field("path", "str", "request path of an API that is observed"),
        Field("upstream", "str", "sidecar: which upstream was chosen; where it could not be reached, see `end`"),
        Field("labels", "labels", "free labels: text, numbers, booleans"),
    ),
    "chunks": (
        *_REQUEST,
        Field(
            "ordinal0",
            "int",
            "position in the request of the first event of this batch, from 0",
            required=True,
        ),
        Field("t_ns", "ints", "receipt stamps", required=True),
        Field("choice", "ints", "choice index of each event", required=True),
        Field("type", "ints", "index into OUTPUT_TYPES", required=True),
        Field("tokens", "ints", "tokens of each event where a source gives them"),
        Field("forwarded_ns", "ints", "sidecar: handed to the socket of the consumer"),
    ),
    "emit": (
        *_REQUEST,
        Field(
            "ordinal0",
            "int",
            "position in the request of the first event of this batch, from 0",
            required=True,
        ),
        Field("choice", "ints", "choice index of each event", required=True),
        Field("cum_tokens", "ints", "output tokens of the choice up to and including this event", required=True),
        Field("computed_ns", "ints", "end of the step that made the last token of the event", required=True),
        Field("handed_ns", "ints", "put on the queue towards the front end"),
        Field("written_ns", "ints", "front end: written to the socket"),
        Field("step_id", "ints", "the step that made it"),
    ),
    "end": (
        *_REQUEST,
        Field("outcome", "str", "exactly one", required=True, accepted=tuple(OUTCOMES)),
        Field("reason", "str", "one of the outcome's reasons; empty when completed"),
        Field("finish_reason", "strs", "per choice, as sent"),
        Field("end_ns", "int", "end of stream", required=True),
        Field("prompt_tokens", "int", "from the final usage"),
        Field("output_tokens", "int", "output tokens received"),
        Field("token_source", "str", "where output_tokens comes from", accepted=TOKEN_SOURCES),
        Field("http_status", "int", "status of the response, if one came"),
        Field("bytes", "int", "body bytes of the response"),
        Field("loop_lag_max_ns", "int", "largest delay of the observer's own event loop while the request ran"),
        Field("consumer_hold_ns", "int", "how long the consumer held off pulling, in sum"),
        Field(
            "upstream",
            "str",
            "sidecar: the upstream that it went to since the chosen one could not be reached; absent: the chosen one",
        ),
        Field(
            "server_timing",
            "labels",
            "sidecar: durations by name, ns, as the response's Server-Timing states them: hops that are not ours",
        ),
    ),
    "late": (
        *_REQUEST,
        Field("observer", "str", "whose record this completes", required=True, accepted=OBSERVERS),
        Field("outcome", "str", "refined outcome", accepted=tuple(OUTCOMES)),
        Field("reason", "str", "refined reason"),
        Field("abort_seen_ns", "int", "engine: the abort reached the scheduler"),
        Field(
            "kv_freed_ns",
            "int",
            "engine: the last KV of the request was free; absent: it held none when the abort came",
        ),
        Field("socket_closed_ns", "int", "the observer saw the consumer's socket close"),
        Field(
            "abort_sent",
            "bool",
            "engine: whether its scheduler was told to drop the request; false: it ran nothing of it, since it had not "
            "heard of it yet or had computed it all; absent: unknown",
        ),
    ),
    "state": (
        *_REQUEST,
        Field("at_ns", "int", "boundary at which the state changed", required=True),
        Field("from_state", "str", "state before; absent at arrival", accepted=STATES),
        Field("to_state", "str", "state after", required=True, accepted=STATES),
        Field("reason", "str", "why"),
    ),
    "step": (
        Field("step_id", "int", "iteration number of this engine process", required=True),
        Field("start_ns", "int", "iteration began (planning included)", required=True),
        Field("end_ns", "int", "tokens known on the host", required=True),
        Field("device_ns", "int", "forward pass alone, duration"),
        Field("prefill_tokens", "int", "tokens of prefills run: of prompts, and after a preemption of answers so far"),
        Field("decode_tokens", "int", "decode tokens run"),
        Field("kv_read_tokens", "int", "positions attended, summed over sequences"),
        Field("sampled_tokens", "int", "tokens drawn: decodes and the prompts that ended"),
        Field(
            "reused_tokens",
            "int",
            "prompt tokens taken from the prefix cache at this boundary instead of run, each once; absent: 0",
        ),
        Field("token_budget", "int", "prefill tokens allowed; absent: no bound"),
        Field("prefill_ids", "strs", "requests in prefill"),
        Field("prefill_token_counts", "ints", "tokens run of each of prefill_ids"),
        Field("prefill_charged_counts", "ints", "of those, charged as service: prompt tokens run for the first time"),
        Field("decode_ids", "strs", "requests in decode"),
        Field("kv_blocks_resident", "int", "blocks that hold tokens"),
        Field("kv_blocks_reserved", "int", "blocks promised to admitted work"),
        Field("kv_blocks_free", "int", "blocks neither resident nor reserved"),
        Field(
            "kv_blocks_cached",
            "int",
            "blocks that nobody holds, promised or not, with a prefix to reuse",
        ),
        Field("preempted_ids", "strs", "requests preempted at this boundary; absent: none"),
        Field("paused_ids", "strs", "requests left out by flow control; absent: none"),
        Field("modelled_flops", "float", "FLOPs from the model's shape: the four parts in sum"),
        Field("prefill_linear_flops", "float", "of those, matrix products with weights for prompt tokens"),
        Field("prefill_attention_flops", "float", "of those, scores and values for prompt tokens"),
        Field("decode_linear_flops", "float", "of those, matrix products with weights for decode tokens"),
        Field("decode_attention_flops", "float", "of those, scores and values for decode tokens"),
        Field("modelled_bytes", "float", "bytes moved from the model's shape: the four parts in sum"),
        Field("weight_bytes", "float", "of those, weights read"),
        Field("kv_read_bytes", "float", "of those, KV read"),
        Field("kv_write_bytes", "float", "of those, KV written"),
        Field("transfer_bytes", "float", "of those, moved between host and device"),
        Field("fault", "str", "injected fault, if any"),
        Field(
            "captured", "bool", "most of it was the capture of a program for its shape, at its first use; absent: no"
        ),
    ),
    "engine": (
        Field("at_ns", "int", "the engine process started, or what follows changed", required=True),
        Field("clock_id", "str", "the clock of every stamp of this engine", required=True),
        Field("model", "str", "model served"),
        Field("dtype", "str", "of weights and KV"),
        Field("device", "str", "where the forward pass runs"),
        Field("threads", "int", "host threads of the forward pass"),
        Field("kv_blocks", "int", "blocks of the KV pool"),
        Field("block_tokens", "int", "positions of a block"),
        Field("max_batch", "int", "sequences in a step, at most"),
        Field("policies", "labels", "the policy in each exchangeable place: order, admission, reservation, budget, …"),
        Field("unit_prompt", "float", "service units of a prompt token"),
        Field("unit_output", "float", "service units of an output token"),
        Field(
            "service_gap_bound",
            "float",
            "how far the service of two tenants that wait can drift apart, units by their weights; absent: no promise",
        ),
        Field("ceiling_flops_per_s", "float", "measured ceiling of matrix products; absent: not calibrated"),
        Field("ceiling_weight_bytes_per_s", "float", "measured ceiling of reading weights; absent: not calibrated"),
        Field("ceiling_kv_bytes_per_s", "float", "measured ceiling of reading and writing KV; absent: not calibrated"),
        Field(
            "ceiling_transfer_bytes_per_s", "float", "measured ceiling of host-device copies; absent: not calibrated"
        ),
    ),
    "decision": (
        *_REQUEST,
        Field("at_ns", "int", "when admission decided", required=True),
        Field("verdict", "str", "what was decided", required=True, accepted=("admit", "queue", "refuse")),
        Field("reason", "str", "why"),
        Field("predicted_first_token_ns", "int", "predicted stamp of the first token"),
        Field("slack_ns", "int", "deadline minus prediction"),
        Field("feasible", "bool", "the plan meets the deadline; absent: it was not asked"),
        Field("resource_safe", "bool", "the KV that it will create has room beside that of admitted work"),
        Field("policy", "str", "the admission policy that decided"),
        Field("predicted_start_steps", "int", "whole steps until it has a slot and KV, 0: at once"),
        Field(
            "predicted_steps", "int", "whole steps until the one with its first token has ended; absent: not predicted"
        ),
        Field("predicted_prefill_tokens", "int", "prompt tokens run in these steps, its own and others'"),
        Field("predicted_decode_tokens", "int", "tokens decoded beside them in these steps"),
        Field(
            "length_source",
            "str",
            "what its own length was read from; absent: the engine has no length table",
            accepted=("cohort", "pooled", "cap"),
        ),
        Field(
            "length_unresolved",
            "float",
            "share of such answers of which the table knows no end, counted as running to max_tokens",
        ),
    ),
}
LIMIT_FIELDS = ("ttft_ns", "ttft_visible_ns", "itl_max_ns", "tpot_ns", "e2e_ns", "min_tokens")

Record = dict[str, Any]


def make(kind: str, **fields: Any) -> Record:
    """A record of this kind without the fields that are None.

    `class` is spelled `class_` here, since it is a keyword. Not validated: `check` is for what comes
    from outside, and the hot path of a writer stays cheap.
    """
    record: Record = {"v": VERSION, "kind": kind}
    for name, value in fields.items():
        if value is not None:
            record["class" if name == "class_" else name] = value
    return record


def _is_int64(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _fits(field: Field, value: object) -> bool:
    match field.type:
        case "int":
            return _is_int64(value)
        case "float":
            return isinstance(value, (int, float)) and not isinstance(value, bool)
        case "str":
            return isinstance(value, str) and len(value) <= 1024
        case "bool":
            return isinstance(value, bool)
        case "ints":
            return isinstance(value, list) and all(item is None or _is_int64(item) for item in value)
        case "strs":
            return isinstance(value, list) and all(isinstance(item, str) or item is None for item in value)
        case "limits":
            return isinstance(value, dict) and all(k in LIMIT_FIELDS and _is_int64(v) for k, v in value.items())
        case "labels":
            return isinstance(value, dict) and all(
                isinstance(k, str) and isinstance(v, (str, int, float, bool)) for k, v in value.items()
            )
    raise AssertionError(f"unknown field type {field.type}")


_BY_NAME = {kind: {field.name: field for field in fields} for kind, fields in SCHEMA.items()}
_REQUIRED = {kind: tuple(f.name for f in fields if f.required) for kind, fields in SCHEMA.items()}
_SAME_LENGTH = {
    "chunks": ("choice", "type", "tokens", "forwarded_ns"),
    "emit": ("choice", "cum_tokens", "handed_ns", "written_ns", "step_id"),
}
_PREFILL_COUNTS = ("prefill_token_counts", "prefill_charged_counts")


def check(record: object) -> Record:
    """The record, or RecordError that names the field, the value's type and what is accepted."""
    if not isinstance(record, dict):
        raise RecordError(f"record: expected a JSON object, got {type(record).__name__}")
    if record.get("v") not in READABLE_VERSIONS:
        raise RecordError(f"v: {record.get('v')!r} is not readable; accepted: {sorted(READABLE_VERSIONS)}")
    kind = record.get("kind")
    fields = _BY_NAME.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise RecordError(f"kind: {str(kind)[:40]!r} is unknown; accepted: {', '.join(SCHEMA)}")
    for name in _REQUIRED[kind]:  # type: ignore[index]
        if name not in record:
            raise RecordError(f"{kind}.{name}: is missing")
    for name, value in record.items():
        if name in ("v", "kind"):
            continue
        field = fields.get(name)
        if field is None:
            raise RecordError(f"{kind}.{name[:40]}: no such field")
        if not _fits(field, value):
            raise RecordError(f"{kind}.{name}: expected {field.type}, got {type(value).__name__}")
        if field.accepted and value not in field.accepted:
            raise RecordError(f"{kind}.{name}: {value!r} is not accepted; accepted: {', '.join(field.accepted)}")
    _check_meaning(str(kind), record)
    return record


def _check_meaning(kind: str, record: Mapping[str, Any]) -> None:
    request_id = record.get("request_id")
    if request_id is not None and not is_request_id(request_id):
        raise RecordError(f"{kind}.request_id: {request_id[:40]!r} is not a 26-character ULID")
    if kind in ("end", "late") and "outcome" in record:
        reasons = OUTCOMES[record["outcome"]]
        if record.get("reason", "") not in reasons:
            raise RecordError(
                f"{kind}.reason: {record.get('reason', '')!r} does not go with {record['outcome']}; "
                f"accepted: {', '.join(reason or '(empty)' for reason in reasons)}"
            )
    if kind == "begin" and "send_ns" not in record and "arrived_ns" not in record:
        raise RecordError("begin: needs send_ns or arrived_ns")
    if kind in _SAME_LENGTH:
        stamps = record["t_ns" if kind == "chunks" else "computed_ns"]
        for name in _SAME_LENGTH[kind]:
            if name in record and len(record[name]) != len(stamps):
                raise RecordError(f"{kind}.{name}: {len(record[name])} values for {len(stamps)} events")
    if kind == "step" and (name := misaligned(record)):
        raise RecordError(
            f"step.{name}: {len(record[name])} values for {len(record.get('prefill_ids', ()))} prefill_ids"
        )


def labels_fit(labels: Mapping[str, Any]) -> bool:
    """They are few and short. Their types are `check`'s business."""
    texts = [text for pair in labels.items() for text in pair if isinstance(text, str)]
    return len(labels) <= MAX_LABELS and all(len(text) <= MAX_LABEL_TEXT for text in texts)


def misaligned(step: Mapping[str, Any]) -> str:
    """A field that counts some requests in prefill and not all; '' for none."""
    requests = len(step.get("prefill_ids", ()))
    return next((name for name in _PREFILL_COUNTS if name in step and len(step[name]) != requests), "")
