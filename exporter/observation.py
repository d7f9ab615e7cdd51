"""One observed request at the sidecar: from its bytes and stamps to records and metrics. No socket here."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Mapping
from typing import Any

import orjson

from exporter.families import Labels, ReceiptFamilies, known_event_tokens
from exporter.recorder import Done, Recorder
from exporter.seen_ids import SeenIds
from exporter.settings import Settings
from sloscope import records
from sloscope.clock import Clock
from sloscope.contract import LIMIT_HEADERS, Contract, Resolved, resolve
from sloscope.definitions import StreamEnd, classify_end, summarise
from sloscope.errors import ContractError
from sloscope.exposition import MetricStore
from sloscope.ids import is_request_id, new_request_id
from sloscope.records import OUTPUT_TYPES
from sloscope.sse import StreamDecoder, StreamEvent, Usage, parse_body

FLUSH_NS = 900_000_000  # the ticker looks 20 times a second, so a batch is at most a second old
_TYPE = {name: position for position, name in enumerate(OUTPUT_TYPES)}
_MAX_TEXT = 200
_MAX_EXPANSION = 8 << 20  # bytes that one read of compressed body may become
_MAX_CHOICES = 1024
PROBLEMS = "sloscope_parse_problems_total"
PROBLEM_NAMES = (
    "bad_compression", "bad_limit_header", "malformed_event", "observer_error", "oversized_event", "request_not_json",
    "request_above_inspect_limit", "response_above_inspect_limit", "unknown_content_encoding", "unrecognised_event",
)  # fmt: skip


class Watch:
    """What all observations of a process share."""

    def __init__(
        self, settings: Settings, contract: Contract, store: MetricStore, recorder: Recorder, clock: Clock
    ) -> None:
        self.settings = settings
        self.contract = contract
        self.contract_hash = contract.hash
        self.store = store
        self.recorder = recorder
        self.clock = clock
        self.families = ReceiptFamilies(store, "sidecar", contract)
        self.seen = SeenIds()
        self.active: dict[str, Observation] = {}  # by request id, oldest first
        for name in PROBLEM_NAMES:
            store.init(PROBLEMS, (name,))

    def problem(self, name: str) -> None:
        assert name in PROBLEM_NAMES, name
        self.store.inc(PROBLEMS, 1, (name,))

    def due(self, now: int) -> list[Observation]:
        """Whose batch is old enough to be written."""
        return [each for each in self.active.values() if each.pending_since and now - each.pending_since >= FLUSH_NS]

    def loop_was_late(self, lag_ns: int) -> None:
        for observation in self.active.values():
            if lag_ns > observation.loop_lag_max_ns:
                observation.loop_lag_max_ns = lag_ns


class Observation:
    """A request from its head to its end. The caller guards every method: nothing here may break the stream."""

    def __init__(self, watch: Watch, headers: Mapping[str, str], path: str, arrived_ns: int) -> None:
        self.watch = watch
        self._headers = headers
        self._path = path[:_MAX_TEXT]
        self._arrived_ns = arrived_ns
        sent_id = headers.get("x-sloscope-request-id", "")
        believed = watch.seen.claim(sent_id)
        self.request_id = sent_id if believed else new_request_id()
        if not believed:
            watch.seen.claim(self.request_id)
        self._retry_of = self._retried(sent_id if is_request_id(sent_id) and not believed else "")

        self._begun = False
        self._ended = False
        self._labels: Labels = ("", "", "")
        self._resolved: Resolved = self._resolve()
        self._streaming: bool | None = None  # asked for; None: the request was not read
        self._n_choices = 1

        self._status: int | None = None
        self._body_bytes = 0
        self._last_read = arrived_ns, arrived_ns, 0  # two stamps and a duration
        self._decoder: StreamDecoder | None = None
        self._inflate: Any = None
        self._whole: bytearray | None = None  # the body of an answer that does not stream
        self._opaque = False  # the body cannot be understood; HTTP alone decides

        # Receipts, one entry per output event and choice.
        self._t_ns = array("q")
        self._choice = array("i")
        self._type = array("b")
        self._tokens: list[int | None] = []
        self._counted: dict[int, int] = {}  # choice → tokens so far, from continuous usage
        self._flushed = 0
        self._forwarded: list[int] = []  # of the batch that is not flushed
        self._added: list[int] = []  # likewise
        self.pending_since = 0  # stamp of its oldest event, 0 without one

        self._finishes: dict[int, str] = {}
        self._usage: Usage | None = None
        self._usage_with_output = False
        self._done = False
        self._error: str | None = None
        self._malformed = False
        self._unrecognised = False
        self._outputs_in_body = 0

        self.loop_lag_max_ns = 0
        self.consumer_hold_ns = 0

    # --- the request

    def _retried(self, repeated_id: str) -> str | None:
        named = self._headers.get("x-sloscope-retry-of", "")
        if is_request_id(named):
            return named
        return repeated_id if repeated_id and self._retry_count() else None

    def _retry_count(self) -> int:
        text = self._headers.get("x-stainless-retry-count", "")
        return int(text) if text.isascii() and text.isdigit() and len(text) < 7 else 0

    def _resolve(self) -> Resolved:
        try:
            return resolve(self.watch.contract, self._headers)
        except ContractError:
            # A sidecar must not break the stream: the class's own limits stand.
            self.watch.problem("bad_limit_header")
            plain = {name: value for name, value in self._headers.items() if name not in LIMIT_HEADERS}
            return resolve(self.watch.contract, plain)

    def begin(self, body: bytes | None, body_complete_ns: int | None, upstream: str, then: Done | None) -> None:
        """The request is known as far as it will be. `body` None: not looked at. `then`: see Recorder.begin."""
        asked = self._read_request(body)
        if body is None and then is not None:
            self.watch.problem("request_above_inspect_limit")
        if body is not None:
            self._streaming = asked.get("stream") is True
        self._n_choices = min(_count(asked.get("n")) or 1, _MAX_CHOICES)
        model = asked.get("model")
        model = model[:_MAX_TEXT] if isinstance(model, str) else ""
        headers = self._headers
        tenant = headers.get(self.watch.settings.tenant_header, "")[:_MAX_TEXT]
        stop_after = headers.get("x-sloscope-stop-after", "")
        retry_count = self._retry_count()
        record = records.make(
            "begin",
            request_id=self.request_id,
            observer="sidecar",
            role=self.watch.settings.role,
            clock_id=self.watch.clock.clock_id,
            external_id=headers.get("x-request-id", "")[:_MAX_TEXT] or None,
            retry_of=self._retry_of,
            arrived_ns=self._arrived_ns,
            body_complete_ns=body_complete_ns,
            model=model or None,
            tenant=tenant or None,
            class_=self._resolved.class_name,
            contract_hash=self.watch.contract_hash,
            limits=self._resolved.limits.as_record(),
            own_limits=dict(self._resolved.own) or None,
            streaming=self._streaming,
            n_choices=self._n_choices if body is not None else None,
            max_tokens=_count(asked.get("max_completion_tokens")) or _count(asked.get("max_tokens")),
            stop_after=int(stop_after) if stop_after.isdigit() and len(stop_after) < 10 else None,
            path=self._path,
            upstream=upstream or None,
            labels={"retry_count": retry_count} if retry_count else None,
        )
        self._labels = self.watch.families.begun(self._resolved.class_name, model, tenant)
        self._begun = True
        self.watch.active[self.request_id] = self
        if then is None:
            self.watch.recorder.put(record)
        else:
            self.watch.recorder.begin(record, then)

    def _read_request(self, body: bytes | None) -> Mapping[str, Any]:
        if body is None:
            return {}
        try:
            asked = orjson.loads(body)
        except ValueError:
            self.watch.problem("request_not_json")
            return {}
        return asked if isinstance(asked, dict) else {}

    # --- the response

    def response_started(self, status: int, content_type: str, content_encoding: str) -> None:
        self._status = status
        coding = content_encoding.strip().lower()
        if coding in ("gzip", "x-gzip", "deflate"):
            self._inflate = zlib.decompressobj(47)  # zlib or gzip, as its header says
        elif coding not in ("", "identity"):
            self._opaque = True
            self.watch.problem("unknown_content_encoding")
        if self._opaque or status >= 400:
            return
        kind = content_type.partition(";")[0].strip().lower()
        # Not every server names its stream one.
        if kind == "text/event-stream" or (self._streaming and kind != "application/json"):
            self._decoder = StreamDecoder(orjson.loads)
        else:
            self._whole = bytearray()

    def received(self, payload: bytes, received_ns: int, forwarded_ns: int, added_ns: int) -> None:
        """Body bytes of one socket read, already forwarded: handed on at `forwarded_ns`, done after `added_ns`."""
        self._body_bytes += len(payload)
        self._last_read = received_ns, forwarded_ns, added_ns
        if self._inflate is not None:
            payload = self._decompress(payload)
        if self._decoder is not None:
            for event in self._decoder.feed(payload):
                self._event(event, received_ns, forwarded_ns, added_ns)
        elif self._whole is not None:
            self._whole += payload
            if len(self._whole) > self.watch.settings.inspect_limit:
                self._whole, self._opaque = None, True
                self.watch.problem("response_above_inspect_limit")

    def _decompress(self, payload: bytes) -> bytes:
        try:
            plain: bytes = self._inflate.decompress(payload, _MAX_EXPANSION)
        except zlib.error:
            plain = b""
        else:
            if not self._inflate.unconsumed_tail:
                return plain
        self.watch.problem("bad_compression")
        self._decoder, self._whole, self._inflate, self._opaque = None, None, None, True
        return plain

    def _event(self, event: StreamEvent, received_ns: int, forwarded_ns: int, added_ns: int) -> None:
        if event.outputs:
            if not self.pending_since:
                self.pending_since = received_ns
            tokens = self._new_tokens(event)
            for choice, kind in event.outputs:
                self._t_ns.append(received_ns)
                self._choice.append(choice)
                self._type.append(_TYPE[kind])
                self._tokens.append(tokens)
                self._forwarded.append(forwarded_ns)
                self._added.append(added_ns)
        if event.usage is not None:
            self._usage, self._usage_with_output = event.usage, bool(event.outputs)
        if event.finishes:
            self._finishes.update(event.finishes)
        self._done = self._done or event.done
        self._error = self._error or event.error
        self._malformed = self._malformed or event.malformed
        self._unrecognised = self._unrecognised or not event.recognised

    def _new_tokens(self, event: StreamEvent) -> int | None:
        """Tokens of this event by continuous usage, which counts up per choice."""
        if event.usage is None or event.usage.completion_tokens is None or len(event.outputs) != 1:
            return None
        choice, total = event.outputs[0].choice, event.usage.completion_tokens
        before = self._counted.get(choice, 0)
        self._counted[choice] = total
        return total - before if total >= before else None

    def flush(self) -> None:
        """The receipts since the last batch, as a record, and what the sidecar added to them."""
        start, stop = self._flushed, len(self._t_ns)
        self.pending_since = 0
        if start == stop:
            return
        received, forwarded = self._t_ns[start:stop].tolist(), self._forwarded
        tokens = self._tokens[start:stop]
        self._flushed, self._forwarded = stop, []
        added, self._added = self._added, []
        record = records.make(
            "chunks",
            request_id=self.request_id,
            ordinal0=start,
            t_ns=received,
            choice=self._choice[start:stop].tolist(),
            type=self._type[start:stop].tolist(),
            tokens=tokens if any(count is not None for count in tokens) else None,
            forwarded_ns=forwarded,
        )
        self.watch.recorder.put(record)
        self.watch.store.observe_many("sloscope_sidecar_added_seconds", added)

    # --- the end

    def ended(self, transport: str, left: str, body_complete: bool, end_ns: int, recorder_lost: bool = False) -> None:
        """The request is over. `transport` and `left` as in StreamEnd; `body_complete`: HTTP says the body is whole."""
        if self._ended:
            return
        self._ended = True
        if not self._begun:
            self.begin(None, None, "", None)
        self.watch.active.pop(self.request_id, None)
        try:
            self._finish_body(body_complete)
        except Exception:  # a body that breaks its parser still belongs to a request that has to end
            self.watch.problem("observer_error")
            self._opaque = True
        events = len(self._t_ns)
        end = classify_end(
            StreamEnd(
                http_status=self._status,
                transport=transport,
                left=left,
                finishes=self._finishes,
                n_choices=self._n_choices,
                done=self._done,
                error=self._error,
                malformed=self._malformed,
                events=events + self._outputs_in_body,
                tokens=self._usage.completion_tokens if self._usage else None,
                min_tokens=self._resolved.limits.min_tokens,
            )
        )
        if recorder_lost and end.outcome != "completed":
            end = end._replace(outcome="unfinished", reason="recorder_lost")
        self.flush()
        tokens, source = self._output_tokens(events, body_complete)
        event_tokens = known_event_tokens(
            self._tokens if self._counted else None, events, self._n_choices, tokens, source != "assumed_one"
        )
        summary = summarise(
            self._arrived_ns,
            self._t_ns,
            self._choice,
            self._type,
            self._n_choices,
            tokens,
            event_tokens,
            completed_ns=end_ns if end.outcome == "completed" else None,
        )
        self.watch.recorder.put(
            records.make(
                "end",
                request_id=self.request_id,
                outcome=end.outcome,
                reason=end.reason,
                finish_reason=self._finish_reasons(),
                end_ns=end_ns,
                prompt_tokens=self._usage.prompt_tokens if self._usage else None,
                output_tokens=tokens,
                token_source=source,
                http_status=self._status,
                bytes=self._body_bytes,
                loop_lag_max_ns=self.loop_lag_max_ns,
                consumer_hold_ns=self.consumer_hold_ns,
            )
        )
        # What was not read may have streamed: it is held to every limit.
        streamed = self._streaming is not False
        self.watch.families.ended(
            self._labels, end, summary, self._resolved, streamed, self._t_ns, self._choice, event_tokens
        )
        self._count_problems()

    def _finish_body(self, body_complete: bool) -> None:
        if self._decoder is not None:
            for event in self._decoder.finish():
                self._event(event, *self._last_read)
        elif self._whole is not None and body_complete and self._whole:
            event = parse_body(bytes(self._whole), orjson.loads)
            self._outputs_in_body = len(event.outputs)
            self._usage, self._error, self._malformed = event.usage, event.error, event.malformed
            self._finishes = dict(event.finishes)
            # Not every server names a finish reason; a whole answer with output in it ended properly.
            self._done = bool(event.outputs)
        elif self._opaque:
            self._done = body_complete
            self._outputs_in_body = 1 if self._body_bytes else 0
        self._whole = None

    def _output_tokens(self, events: int, body_complete: bool) -> tuple[int | None, str | None]:
        if self._usage is not None and self._usage.completion_tokens is not None:
            final = body_complete or not self._usage_with_output
            return self._usage.completion_tokens, "usage" if final else "continuous_usage"
        if events:
            return events, "assumed_one"
        return (None, None) if self._opaque or self._outputs_in_body else (0, None)

    def _finish_reasons(self) -> list[str | None] | None:
        if not self._finishes:
            return None
        size = min(max(self._finishes) + 1, _MAX_CHOICES)
        return [reason[:64] if (reason := self._finishes.get(index)) else None for index in range(size)]

    def _count_problems(self) -> None:
        if self._malformed:
            self.watch.problem("malformed_event")
        if self._unrecognised and not self._malformed:
            self.watch.problem("unrecognised_event")
        if self._decoder is not None and self._decoder.oversized:
            self.watch.problem("oversized_event")


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 < value < 2**31 else None
