"""The Parquet tables that compaction writes: every column, its DuckDB type and its meaning, in one place.

`_ns` stamps are integers of the clock named by the observer's `clock_id`; `_at_ns` are wall times in nanoseconds since
the epoch. A column whose value is not known is NULL, never 0.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sloscope.journal import Manifest
from sloscope.records import OBSERVERS


class Column(NamedTuple):
    name: str
    type: str  # DuckDB's spelling
    doc: str
    derived: str = ""  # SQL over the stored columns, by the names of `_gaps_at`: it is not in the files


def _columns(type_: str, *pairs: tuple[str, str]) -> tuple[Column, ...]:
    return tuple(Column(name, type_, doc) for name, doc in pairs)


# One observer's view of one request; each is prefixed with the observer's name.
OBSERVER_COLUMNS: tuple[Column, ...] = (
    Column("observed", "BOOLEAN", "this observer began a record of the request"),
    Column("role", "VARCHAR", "the hop's place in the chain"),
    Column("clock_id", "VARCHAR", "the clock of every stamp of this observer"),
    *_columns(
        "BIGINT",
        ("arrival_at_ns", "wall time of the arrival: intended if scheduled, else send or arrived"),
        ("end_at_ns", "wall time of the end of stream; NULL while open"),
        ("start_ns", "send (client) or arrived: the zero of every latency"),
        ("first_ns", "first receipt (engine: first computed)"),
        ("last_ns", "last receipt (engine: last computed)"),
        ("end_ns", "end of stream"),
        ("ttft_ns", "start to the first output of any choice"),
        ("ttft_visible_ns", "start to the first output that is not reasoning; an engine does not tell them apart"),
        ("ttft_worst_ns", "the same for the choice that waited longest; NULL when a choice had no output"),
        ("ttft_visible_worst_ns", "start to first visible output of the worst choice; NULL when a choice had none"),
        ("itl_max_ns", "largest gap between receipts of one choice, worst choice; NULL below two receipts"),
        ("span_ns", "last minus first receipt of the choice with the largest TPOT"),
        ("span_tokens", "output tokens of that choice; NULL when unknown"),
        ("e2e_ns", "start to the last receipt; of a completed answer without receipts (it did not stream), to its end"),
        ("stream_end_ns", "start to the end of stream"),
        ("events", "output events"),
        ("tokens", "output tokens"),
    ),
    *_columns(
        "VARCHAR",
        ("token_source", "where `tokens` comes from: usage, continuous_usage, engine, tokenizer or assumed_one"),
        ("outcome", "completed, failed, cancelled or unfinished; NULL while open"),
        ("reason", "one of the outcome's reasons; empty when completed"),
        ("finish_reason", "stop, length, tool_calls, content_filter or other; comma-separated where choices differ"),
    ),
    *_columns(
        "BIGINT",
        ("http_status", "status of the response, if one came"),
        ("loop_lag_max_ns", "largest delay of the observer's own event loop while the request ran"),
        ("consumer_hold_ns", "how long the consumer held off pulling, in sum"),
    ),
)

REQUESTS: tuple[Column, ...] = (
    *_columns(
        "VARCHAR",
        ("request_id", "26-character ULID"),
        ("external_id", "the caller's own x-request-id; may repeat"),
        ("retry_of", "request id that this one retries"),
        ("model", "model asked for"),
        ("tenant", "tenant label as sent"),
        ("class", "request class after defaulting"),
        ("contract_hash", "SHA-256 of the resolved contract"),
        ("labels", "free labels, a JSON object"),
        ("sidecar_upstream", "the upstream whose answer the consumer got, or that was asked for it; a URL"),
        (
            "sidecar_server_timing",
            "durations by name, ns, a JSON object: what hops that are not ours said in Server-Timing",
        ),
    ),
    *_columns(
        "BOOLEAN",
        ("streaming", "asked for server-sent events"),
        ("warmup", "sent before measuring began; excluded by rule"),
        ("length_forced", "its length was forced, so that it says nothing about natural lengths"),
    ),
    *_columns(
        "BIGINT",
        ("n_choices", "choices asked for"),
        ("prompt_tokens", "prompt length, tokens: from the usage, else as sent"),
        ("max_tokens", "cap on output tokens"),
        ("stop_after", "natural stop asked of the reference server, tokens"),
        ("own_ttft_ns", "limit that the request itself carried"),
        ("own_ttft_visible_ns", "limit that the request itself carried"),
        ("own_itl_max_ns", "limit that the request itself carried"),
        ("own_tpot_ns", "limit that the request itself carried"),
        ("own_e2e_ns", "limit that the request itself carried"),
        ("arrival_at_ns", "wall time of the arrival at the first of client, sidecar, engine"),
    ),
    Column("arrival_date", "DATE", "day of the arrival, UTC; the partition"),
    *(Column(f"{o}_{c.name}", c.type, f"{o}: {c.doc}") for o in OBSERVERS for c in OBSERVER_COLUMNS),
    *_columns(
        "BIGINT",
        ("client_intended_ns", "scheduled arrival; NULL when not scheduled"),
        ("client_dispatch_lag_ns", "scheduled arrival to send; NULL when not scheduled"),
        ("client_ttft_intended_ns", "scheduled arrival to first receipt; NULL when not scheduled"),
        ("sidecar_body_complete_ns", "stamp of the last request byte at the sidecar"),
        ("engine_body_complete_ns", "stamp of the last request byte at the server"),
        ("sidecar_upstream_first_ns", "stamp of the first output event, received from upstream"),
        ("sidecar_forwarded_first_ns", "stamp of the first output event, handed to the consumer's socket"),
        ("engine_queued_ns", "stamp of the first entry into WAITING"),
        ("engine_prefill_start_ns", "stamp of the first entry into PREFILL: the admission into the batch"),
        ("engine_first_computed_ns", "stamp of the first event: its step ended"),
        ("engine_first_handed_ns", "stamp of the first event: put on the queue to the front end"),
        ("engine_first_written_ns", "stamp of the first event: written to the socket"),
        ("engine_socket_closed_ns", "stamp at which the server saw the consumer's socket close"),
        ("engine_abort_seen_ns", "stamp at which the abort reached the scheduler"),
        ("engine_kv_freed_ns", "stamp at which the last KV of the request was free"),
        ("engine_preemptions", "times the request was preempted; NULL when no states were recorded"),
    ),
    Column(
        "engine_abort_sent",
        "BOOLEAN",
        "of a consumer that left: the server told its scheduler to drop the request; false: it ran nothing of it; NULL "
        "when not told",
    ),
    Column("client_alignment", "VARCHAR", "client receipts with emissions: ordinal, tokens, none; NULL without both"),
    Column("sidecar_alignment", "VARCHAR", "sidecar receipts with emissions: ordinal, tokens, none; NULL without both"),
    Column(
        "hedge_waste_output_tokens",
        "BIGINT",
        "output tokens of losing attempts: the engine's count, else as received; NULL with one attempt, or if unknown",
    ),
)  # fmt: skip

_ID_AND_DATE = (
    Column("request_id", "VARCHAR", "26-character ULID"),
    Column("arrival_date", "DATE", "day of the request's arrival, UTC; the partition"),
)

CHUNKS: tuple[Column, ...] = (
    *_ID_AND_DATE,
    Column("client_t_ns", "BIGINT[]", "receipt stamps in order of receipt; NULL when not observed"),
    Column("client_choice", "INTEGER[]", "choice of each event"),
    Column("client_type", "TINYINT[]", "0 content, 1 reasoning, 2 tool"),
    Column("client_tokens", "INTEGER[]", "tokens of each event; NULL where no source gives them"),
    Column("sidecar_t_ns", "BIGINT[]", "receipt stamps from upstream; NULL when not observed"),
    Column("sidecar_forwarded_ns", "BIGINT[]", "handed to the consumer's socket"),
    Column("sidecar_choice", "INTEGER[]", "choice of each event"),
    Column("sidecar_type", "TINYINT[]", "0 content, 1 reasoning, 2 tool"),
    Column("sidecar_tokens", "INTEGER[]", "tokens of each event; NULL where no source gives them"),
    Column("engine_computed_ns", "BIGINT[]", "end of the step that made the event; NULL when not observed"),
    Column("engine_handed_ns", "BIGINT[]", "put on the queue to the front end"),
    Column("engine_written_ns", "BIGINT[]", "written to the socket"),
    Column("engine_choice", "INTEGER[]", "choice of each event"),
    Column("engine_cum_tokens", "INTEGER[]", "tokens of the choice up to and including the event"),
)

LATE_GAPS: tuple[Column, ...] = (
    *_ID_AND_DATE,
    Column("observer", "VARCHAR", "client or sidecar"),
    Column("choice", "INTEGER", "choice index"),
    Column("ordinal", "BIGINT", "of the event that ends the gap, from 1 in its choice", "{ordinal}"),
    Column(
        "kind",
        "VARCHAR",
        "first_output (ordinal 1) or gap",
        "case when {ordinal} = 1 then 'first_output' else 'gap' end",
    ),
    Column("prev_ns", "BIGINT", "receipt stamp of the event before; NULL at ordinal 1", "{at} - {gap}"),
    Column("at_ns", "BIGINT", "receipt stamp of the event", "{at}"),
    Column("gap_ns", "BIGINT", "at minus prev; NULL at ordinal 1", "{gap}"),
    Column(
        "emit_prev_ns",
        "BIGINT",
        "when the engine computed the event before; NULL when not aligned",
        "({at} - {lag}) - ({gap} - {delivery})",
    ),
    Column("emit_at_ns", "BIGINT", "when the engine computed the event; NULL when not aligned", "{at} - {lag}"),
    Column(
        "emit_gap_ns",
        "BIGINT",
        "the engine's own gap; NULL at ordinal 1 or when not aligned",
        "{gap} - {delivery}",
    ),
    Column("hold_ns", "BIGINT", "at minus emitted; NULL across clocks", "case when same_clock then {lag} end"),
    Column(
        "prev_hold_ns",
        "BIGINT",
        "the same of the event before",
        "case when same_clock then {lag} - {delivery} end",
    ),
    Column(
        "together",
        "BIGINT",
        "events of the choice received within 2 ms from at_ns on, this one included",
        "{together}",
    ),
    Column(
        "emit_together",
        "BIGINT",
        "how many of those the engine computed within 2 ms; NULL when not aligned",
        "{emit_together}",
    ),
    Column("same_clock", "BOOLEAN", "receipt and engine stamps may be subtracted; NULL without both"),
    Column("alignment", "VARCHAR", "ordinal, tokens or none; NULL without both"),
)

ENGINE_ID = "the engine process: its journal's name without the sequence number, boot-pid-start"

# All that happens at a boundary bears its stamp.
_PLACE = Column("place", "BIGINT", "byte of the record in its journal file: the order of what has one stamp")

STEPS: tuple[Column, ...] = (
    Column("step_id", "BIGINT", "iteration number of its engine process, from 1 in each"),
    Column("engine_id", "VARCHAR", ENGINE_ID),
    Column("clock_id", "VARCHAR", "the clock of its stamps"),
    *_columns(
        "BIGINT",
        ("start_ns", "iteration began, planning included"),
        ("end_ns", "tokens known on the host"),
        ("start_at_ns", "wall time of the start"),
        ("device_ns", "duration of the forward pass alone"),
        ("prefill_tokens", "tokens of prefills run: of prompts, and after a preemption of answers so far"),
        ("decode_tokens", "decode tokens run"),
        ("kv_read_tokens", "positions attended, summed over sequences"),
        ("sampled_tokens", "tokens drawn: decodes and the prompts that ended"),
        ("reused_tokens", "prompt tokens taken from the prefix cache at this boundary instead of run, each once"),
        ("token_budget", "prefill tokens allowed; NULL: no bound, or not recorded"),
        ("decode_requests", "requests in decode"),
        ("prefill_requests", "requests in prefill"),
        ("kv_blocks_resident", "blocks that hold tokens"),
        ("kv_blocks_reserved", "blocks promised to admitted work"),
        ("kv_blocks_free", "blocks neither resident nor reserved"),
        ("kv_blocks_cached", "blocks that nobody holds, promised or not, with a prefix to reuse"),
        ("preempted", "requests preempted at this boundary"),
        ("paused", "requests left out by flow control"),
        ("gap_before_ns", "start minus the end of the same process's step before; NULL at its first"),
    ),
    Column("fault", "VARCHAR", "injected fault, if any"),
    Column("captured", "BOOLEAN", "most of it was the capture of a program for its shape; NULL: no"),
    *_columns(
        "DOUBLE",
        ("modelled_flops", "FLOPs from the model's shape"),
        ("prefill_linear_flops", "of those, matrix products with weights for prompt tokens"),
        ("prefill_attention_flops", "of those, scores and values for prompt tokens"),
        ("decode_linear_flops", "of those, matrix products with weights for decode tokens"),
        ("decode_attention_flops", "of those, scores and values for decode tokens"),
        ("modelled_bytes", "bytes moved, from the model's shape"),
        ("weight_bytes", "of those, weights read"),
        ("kv_read_bytes", "of those, KV read"),
        ("kv_write_bytes", "of those, KV written"),
        ("transfer_bytes", "of those, moved between host and device"),
    ),
)

STEP_REQUESTS: tuple[Column, ...] = (
    Column("step_id", "BIGINT", "the step"),
    Column("engine_id", "VARCHAR", ENGINE_ID),
    Column("clock_id", "VARCHAR", "the step's clock"),
    Column("request_id", "VARCHAR", "a request that took part"),
    Column("role", "VARCHAR", "prefill, decode, preempted, or paused by flow control"),
    Column("tokens", "BIGINT", "prompt tokens of it that the step ran; NULL in another role, or not recorded"),
    Column("charged", "BIGINT", "of those, the ones that are service: run for the first time; NULL likewise"),
)

ENGINES: tuple[Column, ...] = (
    Column("engine_id", "VARCHAR", ENGINE_ID),
    Column("clock_id", "VARCHAR", "the clock of its stamps"),
    Column("at_ns", "BIGINT", "from here on: the process started, or something below changed"),
    Column("started_at_ns", "BIGINT", "wall time of the same"),
    Column("model", "VARCHAR", "model served"),
    Column("dtype", "VARCHAR", "of weights and KV"),
    Column("device", "VARCHAR", "where the forward pass runs"),
    *_columns(
        "BIGINT",
        ("threads", "host threads of the forward pass"),
        ("kv_blocks", "blocks of the KV pool"),
        ("block_tokens", "positions of a block"),
        ("max_batch", "sequences in a step, at most"),
    ),
    Column("policies", "VARCHAR", "the policy in each exchangeable place, a JSON object"),
    *_columns(
        "DOUBLE",
        ("unit_prompt", "service units of a prompt token"),
        ("unit_output", "service units of an output token"),
        (
            "service_gap_bound",
            "how far the service of two tenants that wait can drift apart, units by their weights; NULL: no promise",
        ),
        ("ceiling_flops_per_s", "measured ceiling of matrix products; NULL: not calibrated"),
        ("ceiling_weight_bytes_per_s", "measured ceiling of reading weights; NULL: not calibrated"),
        ("ceiling_kv_bytes_per_s", "measured ceiling of reading and writing KV; NULL: not calibrated"),
        ("ceiling_transfer_bytes_per_s", "measured ceiling of host-device copies; NULL: not calibrated"),
    ),
    _PLACE,
)

STATES: tuple[Column, ...] = (
    Column("request_id", "VARCHAR", "26-character ULID"),
    Column("engine_id", "VARCHAR", ENGINE_ID),
    Column("clock_id", "VARCHAR", "the clock of its stamp"),
    Column("at_ns", "BIGINT", "boundary at which the state changed"),
    Column("from_state", "VARCHAR", "state before; NULL at arrival"),
    Column("to_state", "VARCHAR", "state after"),
    Column("reason", "VARCHAR", "why"),
    _PLACE,
)

DECISIONS: tuple[Column, ...] = (
    Column("request_id", "VARCHAR", "26-character ULID"),
    Column("attempt", "BIGINT", "hedged attempt, from 0"),
    Column("engine_id", "VARCHAR", ENGINE_ID),
    Column("clock_id", "VARCHAR", "the clock of its stamps"),
    Column("at_ns", "BIGINT", "when admission decided"),
    Column("verdict", "VARCHAR", "admit, queue or refuse"),
    Column("reason", "VARCHAR", "why"),
    Column("predicted_first_token_ns", "BIGINT", "predicted stamp of the first token"),
    Column("slack_ns", "BIGINT", "deadline minus prediction"),
    Column("feasible", "BOOLEAN", "the plan meets the deadline; NULL: it was not asked"),
    Column("resource_safe", "BOOLEAN", "the KV that it will create has room beside that of admitted work"),
    Column("policy", "VARCHAR", "the admission policy that decided"),
    *_columns(
        "BIGINT",
        ("predicted_start_steps", "whole steps until it has a slot and KV, 0: at once"),
        ("predicted_steps", "whole steps until the one with its first token has ended; NULL: not predicted"),
        ("predicted_prefill_tokens", "prompt tokens run in these steps, its own and others'"),
        ("predicted_decode_tokens", "tokens decoded beside them in these steps"),
    ),
    Column(
        "length_source", "VARCHAR", "cohort, pooled or cap: what its own length was read from; NULL: no length table"
    ),
    Column(
        "length_unresolved",
        "DOUBLE",
        "share of such answers of which the table knows no end, counted as running to max_tokens",
    ),
    _PLACE,
)

# Compaction's own: which journal lines a row was made from, so that a late fact can remake it.
SOURCES: tuple[Column, ...] = (
    Column("request_id", "VARCHAR", "26-character ULID"),
    Column("journal", "VARCHAR", "journal file, relative to the events directory"),
    Column("starts", "BIGINT[]", "first byte of each line"),
    Column("ends", "BIGINT[]", "byte after each line"),
    Column("wall_offsets", "BIGINT[]", "wall minus monotonic time in force at each record's stamp; 0 when it has none"),
)

TABLES: dict[str, tuple[Column, ...]] = {
    "requests": REQUESTS,
    "chunks": CHUNKS,
    "late_gaps": LATE_GAPS,
    "steps": STEPS,
    "step_requests": STEP_REQUESTS,
    "states": STATES,
    "decisions": DECISIONS,
    "engines": ENGINES,
}
# A stored row of `late_gaps` holds up to this many that follow on each other: the stamps of one are those before the
# next, and in rows of their own they would be written twice.
GAPS_A_ROW = 4


def _gaps_of_a_row() -> Iterator[Column]:
    for place in range(GAPS_A_ROW):
        yield Column(f"gap_{place}_ns", "BIGINT", "at minus prev; NULL at ordinal 1 and behind the row's last")
        yield Column(f"delivery_{place}_ns", "BIGINT", "gap minus the engine's own gap; NULL also when not aligned")
        yield Column(f"together_{place}", "BIGINT", "as `together`")
        yield Column(f"emit_together_{place}", "BIGINT", "as `emit_together`")


# In the files alone: the columns above are derived from them, and they are small numbers where stamps are large.
STORED_ONLY: dict[str, tuple[Column, ...]] = {
    "late_gaps": (
        Column("ordinal_0", "BIGINT", "ordinal of the row's first"),
        Column("at_0_ns", "BIGINT", "its receipt stamp"),
        Column("lag_0_ns", "BIGINT", "at minus emitted, also across clocks; NULL when not aligned"),
        *_gaps_of_a_row(),
    ),
}
PER_REQUEST = ("requests", "chunks", "late_gaps", "sources")  # written and rewritten together, part by part
PER_EVENT = ("steps", "step_requests", "states", "decisions", "engines")  # appended only


def columns(table: str) -> tuple[Column, ...]:
    return SOURCES if table == "sources" else TABLES[table]


def stored(table: str) -> tuple[Column, ...]:
    """The columns that stand in the files."""
    return tuple(column for column in columns(table) if not column.derived) + STORED_ONLY.get(table, ())


def fingerprint() -> str:
    """Names the schema of the files. Tables that were written under another one are made anew from the journals."""
    schema = [[table, [[column.name, column.type] for column in stored(table)]] for table in TABLES]
    return hashlib.sha256(json.dumps(schema).encode()).hexdigest()[:16]


def empty_sql(table: str) -> str:
    """A relation with the table's columns and no row, for a FROM."""
    listed = ", ".join(f'cast(null as {column.type}) as "{column.name}"' for column in columns(table))
    return f"(select {listed} where false)"


def files(manifest: Manifest, events: Path, table: str) -> Iterator[Path]:
    for relative in manifest.tables.get(table, []):
        yield Path(events) / relative


def table_sql(manifest: Manifest, events: Path, table: str) -> str:
    """What stands after FROM to read the table: its live Parquet files, or an empty relation of the same columns."""
    paths = [str(path).replace("'", "''") for path in files(manifest, events, table)]
    if not paths:
        return empty_sql(table)
    listed = ", ".join(f"'{path}'" for path in paths)
    scan = f"read_parquet([{listed}], hive_partitioning=false, union_by_name=true)"
    if stored(table) == columns(table):
        return scan
    return "(" + " union all ".join(_gaps_at(place, scan) for place in range(GAPS_A_ROW)) + ")"


def _gaps_at(place: int, scan: str) -> str:
    """The late gaps that stand at one place of their stored rows. Stamps are those of the first, plus what follows."""
    until = range(1, place + 1)
    stored_as = {
        "ordinal": f"(ordinal_0 + {place})",
        "at": f"({' + '.join(['at_0_ns', *(f'gap_{k}_ns' for k in until)])})",
        "lag": f"({' + '.join(['lag_0_ns', *(f'delivery_{k}_ns' for k in until)])})",
        "gap": f"gap_{place}_ns",
        "delivery": f"delivery_{place}_ns",
        "together": f"together_{place}",
        "emit_together": f"emit_together_{place}",
    }
    selected = ", ".join(
        f'{c.derived.format_map(stored_as)} as "{c.name}"' if c.derived else f'"{c.name}"' for c in LATE_GAPS
    )
    return f"select {selected} from {scan} where together_{place} is not null"
