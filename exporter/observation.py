"""One observed request at the sidecar: from its bytes and stamps to records and metrics. No socket here."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from operator import sub
from typing import Any

import orjson

from exporter.backlog import Backlog
from exporter.families import Labels, ReceiptFamilies, known_event_tokens
from exporter.seen_ids import SeenIds
from exporter.server_timing import durations_ns
from exporter.settings import Settings
from sloscope import catalogue, records
from sloscope.clock import Clock
from sloscope.contract import LIMIT_HEADERS, Contract, Resolved, resolve
from sloscope.definitions import Ended, Summary
from sloscope.errors import ContractError
from sloscope.exposition import MetricStore
from sloscope.ids import is_request_id, new_request_id
from sloscope.lag_peaks import LagPeaks
from sloscope.recorder import Done, Recorder
from sloscope.sse_pattern import Read
from sloscope.stream_record import MAX_CHOICES, StreamRecord

FLUSH_NS = 800_000_000  # with the ticker's 50 ms and the recorder's, a batch is at most a second old
MAX_READS = 64  # of one request that may wait to be understood together: about 0.2 ms of work
_PIECE = 4096  # bytes of a read that count as one of these
_FAR_BEHIND = 512  # of them, at which no more is read
_MAX_TEXT = 200
_LOST = Ended("unfinished", "recorder_lost")  # how it ended is not known, as of a recorder that died
_STOP_AFTER = re.compile(r"[0-9]{1,9}")
_OPEN = catalogue.receipt("sidecar", "inflight_requests").name
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
        self.backlog: Backlog | None = None  # without it all is understood at once
        self.active: dict[str, Observation] = {}  # by request id, oldest first
        self._next: deque[tuple[int, Observation]] = deque()  # when each batch is due, the earliest first
        self.lag = LagPeaks()  # of the loop
        for name in PROBLEM_NAMES:
            store.init(PROBLEMS, (name,))

    def problem(self, name: str) -> None:
        assert name in PROBLEM_NAMES, name
        self.store.inc(PROBLEMS, 1, (name,))

    def due(self, now: int) -> list[Observation]:
        """Whose batch is to be written: each once in FLUSH_NS, since to ask all of them at every tick costs more."""
        found: list[Observation] = []
        while self._next and self._next[0][0] <= now:
            _, each = self._next.popleft()
            if not each.is_over:
                found.append(each)
                self._next.append((now + FLUSH_NS, each))
        return found

    def begun(self, observation: Observation) -> None:
        self.active[observation.request_id] = observation
        self._next.append((self.clock.monotonic_ns() + FLUSH_NS, observation))


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
        self.is_over = False
        self._counted: Ended | None = None  # the end that the metrics have
        self._asked: Mapping[str, Any] | None = None
        self._begin: records.Record = {}
        self._attempt: int | None = None  # whose stream this is, None for the first
        self.went_to: dict[int, str] = {}  # attempts whose upstream is another one than in their begin
        self._labels: Labels = ("", "", "")
        self._resolved: Resolved = self._resolve()
        # Whether it streams, and how many choices, is known when the request was read.
        self._stream = StreamRecord(orjson.loads, watch.settings.inspect_limit)
        self._last_handed = arrived_ns, 0  # of the last read: forwarded_ns, added_ns
        # Reads that were handed on and not understood yet; the last three numbers are received_ns, forwarded_ns and
        # done_ns. One list for life, which `relay` appends to.
        self.reads: list[Read] = []
        self.is_behind = False  # the backlog has it
        self.on_caught_up: Callable[[], None] | None = None
        self._end: tuple[str, str, bool, int] | None = None  # as `ended` was told, while it waits for what was received
        self._flushed = 0  # receipts in the journal
        self._forwarded: list[int] = []  # of the batch that is not flushed
        self._added: list[int] = []  # likewise

        self._server_timing: dict[str, int] = {}
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
        """The request is known as far as it will be. `body` None: not looked at. `then`: see Recorder.begin.

        Raised or not, the request is offered once.
        """
        try:
            self._begin_whole(body, body_complete_ns, upstream, then)
        except Exception:
            if not self._begun:
                self._begin_bare(upstream)
            raise

    def _begin_whole(self, body: bytes | None, body_complete_ns: int | None, upstream: str, then: Done | None) -> None:
        asked = self.read_request(body)
        if body is None and then is not None:
            self.watch.problem("request_above_inspect_limit")
        if body is not None:
            self._stream.streaming = asked.get("stream") is True
            self._stream.n_choices = min(_count(asked.get("n")) or 1, MAX_CHOICES)
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
            streaming=self._stream.streaming,
            n_choices=self._stream.n_choices if body is not None else None,
            max_tokens=_count(asked.get("max_completion_tokens")) or _count(asked.get("max_tokens")),
            stop_after=int(stop_after) if _STOP_AFTER.fullmatch(stop_after) else None,
            path=self._path,
            upstream=upstream or None,
            labels={"retry_count": retry_count} if retry_count else None,
        )
        self._count_begin(record, model, tenant)
        if then is None:
            self.watch.recorder.put(record)
        else:
            self.watch.recorder.begin(record, then)

    def _begin_bare(self, upstream: str) -> None:
        """With nothing that the request says of itself, since to read that is what failed."""
        record = records.make(
            "begin",
            request_id=self.request_id,
            observer="sidecar",
            role=self.watch.settings.role,
            clock_id=self.watch.clock.clock_id,
            arrived_ns=self._arrived_ns,
            class_=self._resolved.class_name,
            contract_hash=self.watch.contract_hash,
            limits=self._resolved.limits.as_record(),
            path=self._path,
            upstream=upstream or None,
        )
        self._count_begin(record, "", "")
        self.watch.recorder.put(record)

    def _count_begin(self, record: records.Record, model: str, tenant: str) -> None:
        self._begin = record
        self._labels = self.watch.families.begun(self._resolved.class_name, model, tenant)
        self._begun = True
        self.watch.begun(self)

    def read_request(self, body: bytes | None) -> Mapping[str, Any]:
        """What the request asks for, read once; empty where it is not known."""
        if self._asked is None:
            self._asked = {} if body is None else self._parse(body)
        return self._asked

    def _parse(self, body: bytes) -> Mapping[str, Any]:
        try:
            asked = orjson.loads(body)
        except ValueError:
            self.watch.problem("request_not_json")
            return {}
        return asked if isinstance(asked, dict) else {}

    # --- attempts: one of several answers the request, each has records of its own

    def new_stream(self) -> StreamRecord:
        """For what one more attempt brings, until it is decided which one counts."""
        return StreamRecord(
            orjson.loads, self.watch.settings.inspect_limit, self._stream.streaming, self._stream.n_choices
        )

    def begin_attempt(self, number: int, upstream: str, then: Done) -> None:
        self.watch.recorder.begin({**self._begin, "attempt": number, "upstream": upstream}, then)

    def decided(self, number: int, stream: StreamRecord) -> None:
        """This attempt answers the request."""
        self._attempt = number or None
        self._stream = stream

    def released(self, forwarded_ns: int, added_ns: int) -> None:
        """What the attempt had brought up to now was handed on."""
        self._last_handed = forwarded_ns, added_ns
        self._count_new(forwarded_ns, added_ns)

    def end_attempt(
        self, number: int, stream: StreamRecord, transport: str, left: str, body_complete: bool, end_ns: int
    ) -> None:
        """An attempt that does not answer the request is over. Raised or not, it has an end."""
        end, known = _LOST, {}
        try:
            stream.finish(body_complete)
            known = stream.ended()
            end = stream.classify(transport, left, self._resolved.limits.min_tokens)
        finally:
            self.watch.recorder.put(
                records.make(
                    "end",
                    request_id=self.request_id,
                    attempt=number or None,
                    outcome=end.outcome,
                    reason=end.reason,
                    end_ns=end_ns,
                    upstream=self.went_to.get(number),
                    **known,
                )
            )

    @property
    def prompt_tokens(self) -> int | None:
        """As the answer's usage says, once it has."""
        return self._stream.prompt_tokens

    @property
    def events(self) -> int:
        """Output events so far, as understood."""
        return len(self._stream.type)

    @property
    def about_events(self) -> int:
        """The same, a read that is not understood yet taken for one."""
        return len(self._stream.type) + len(self.reads)

    # --- the response

    def response_started(self, status: int, content_type: str, content_encoding: str) -> None:
        self._stream.response(status, content_type, content_encoding)

    def timed(self, server_timing: str) -> None:
        """The response's own word for how long hops took."""
        self._server_timing = durations_ns(server_timing)

    def forwarded(self, payload: bytes, received_ns: int, forwarded_ns: int, done_ns: int) -> None:
        """Body bytes of one socket read, which were handed on from `forwarded_ns` to `done_ns`. They are understood
        with others, at the latest with their batch.
        """
        size = len(payload)
        for start in range(0, size, _PIECE):
            self.reads.append((payload, start, min(start + _PIECE, size), received_ns, forwarded_ns, done_ns))
        if len(self.reads) >= MAX_READS:
            self._fall_behind()

    @property
    def is_far_behind(self) -> bool:
        """So much waits that no more should be read, until `on_caught_up`."""
        return len(self.reads) >= _FAR_BEHIND

    def _fall_behind(self) -> None:
        if self.watch.backlog is None:
            self.understand()
        elif not self.is_behind:
            self.is_behind = True
            self.watch.backlog.add(self)

    def catch_up(self, slice_ns: int) -> None:
        """A slice of what waits, and what waited for all of it to be understood."""
        try:
            self.understand(slice_ns)
        finally:
            self.is_behind = bool(self.reads)
            if not self.is_behind:
                if self.on_caught_up is not None:
                    self.on_caught_up()
                if self._end is not None:
                    self.ended(*self._end)

    def understand(self, slice_ns: int | None = None) -> None:
        """Makes receipts of what was forwarded, all of it or as much as a slice of time lets. A read that raises costs
        only itself; raises the last such error.
        """
        waiting = self.reads
        if not waiting:
            return
        now_ns = self.watch.clock.monotonic_ns
        until_ns = now_ns() + slice_ns if slice_ns is not None else None
        failure, done, at_once = None, 0, MAX_READS
        while done < len(waiting):
            block = waiting[done : done + at_once]
            try:
                count = self._understand_alike(block)
                if not count:
                    self._understand_one(block[0])
            except Exception as error:
                count, failure = 0, error
            # Where one is unlike those before it, so may be the next.
            at_once = MAX_READS if count else 1
            done += count or 1
            if until_ns is not None and now_ns() >= until_ns:
                break
        self._last_handed = waiting[done - 1][4], waiting[done - 1][5] - waiting[done - 1][3]
        del waiting[:done]
        if failure is not None:
            raise failure

    def _understand_alike(self, reads: Sequence[Read]) -> int:
        """As many of these as can be understood in one go; how many."""
        count = self._stream.receive_alike(reads)
        if count:
            _, _, _, received, forwarded, done = zip(*reads[:count], strict=True)
            self._forwarded += forwarded
            self._added += map(sub, done, received)
        return count

    def _understand_one(self, read: Read) -> None:
        data, start, stop, received_ns, forwarded_ns, done_ns = read
        try:
            self._stream.receive(received_ns, data[start:stop])
        finally:
            self._count_new(forwarded_ns, done_ns - received_ns)

    def _count_new(self, forwarded_ns: int, added_ns: int) -> None:
        """Every receipt of one read was handed on at once."""
        new = len(self._stream.type) - self._flushed - len(self._forwarded)
        self._forwarded += (forwarded_ns,) * new
        self._added += (added_ns,) * new

    def flush(self) -> None:
        """The receipts since the last batch, as a record, and what the sidecar added to them."""
        try:
            if not self.is_behind:
                self.understand()
        finally:
            self._write_batch()

    def _write_batch(self) -> None:
        start, stop = self._flushed, self._flushed + len(self._forwarded)
        if start == stop:
            return
        forwarded, self._forwarded = self._forwarded, []
        added, self._added = self._added, []
        self._flushed = stop
        record = records.make(
            "chunks",
            request_id=self.request_id,
            attempt=self._attempt,
            forwarded_ns=forwarded,
            **self._stream.chunks(start, stop),
        )
        self.watch.recorder.put_later(record)
        self.watch.store.observe_many("sloscope_sidecar_added_seconds", added)

    # --- the end

    def ended(self, transport: str, left: str, body_complete: bool, end_ns: int) -> None:
        """The request is over. `transport` and `left` as in StreamEnd; `body_complete`: HTTP says the body is whole.

        Raised or not, the request ends once, in the metrics and in the journal, and alike in both.
        """
        if self.is_over:
            return
        if self._end is not None:
            transport, left, body_complete, end_ns = self._end
        elif self.is_behind:
            self._end = transport, left, body_complete, end_ns
            return
        self.is_over = True
        try:
            if not self._begun:
                self.begin(None, None, "", None)
            self._conclude(transport, left, body_complete, end_ns)
        except Exception:
            if self._begun:
                self._conclude_bare(end_ns)
            raise
        finally:
            self.watch.active.pop(self.request_id, None)

    def _conclude(self, transport: str, left: str, body_complete: bool, end_ns: int) -> None:
        stream = self._stream
        try:
            self.understand()
        except Exception:  # as below
            self.watch.problem("observer_error")
        try:
            stream.finish(body_complete)
            self._count_new(*self._last_handed)
        except Exception:  # a body that breaks its parser still belongs to a request that has to end
            self.watch.problem("observer_error")
        self.flush()
        end_ns = stream.end_ns(end_ns)
        end = stream.classify(transport, left, self._resolved.limits.min_tokens)
        record = self._end_record(end, end_ns, stream.ended(), self._server_timing or None)
        summary = stream.summary(self._arrived_ns, end_ns if end.outcome == "completed" else None)
        event_tokens = known_event_tokens(
            stream.event_tokens, summary.events, stream.n_choices, summary.tokens, stream.token_source != "assumed_one"
        )
        for name in stream.problems:
            self.watch.problem(name)
        # What was not read may have streamed: it is held to every limit.
        streamed = stream.streaming is not False
        still_open = self.watch.store.get(_OPEN, self._labels)
        try:
            self.watch.families.ended(
                self._labels, end, summary, self._resolved, streamed, stream.t_ns, stream.choice, event_tokens
            )
        finally:
            # It may have raised over the gaps, after the end was counted.
            if self.watch.store.get(_OPEN, self._labels) < still_open:
                self._counted = end
        self.watch.recorder.put(record)  # last: a record that was put is not put again

    def _conclude_bare(self, end_ns: int) -> None:
        """The end as it was counted, else as one that nobody knows."""
        end = self._counted or _LOST
        try:
            self.watch.recorder.put(self._end_record(end, end_ns, {}, None))
        finally:
            if self._counted is None:
                self.watch.families.ended(self._labels, end, Summary(), self._resolved, True, (), (), None)

    def _end_record(
        self, end: Ended, end_ns: int, known: Mapping[str, Any], server_timing: Mapping[str, int] | None
    ) -> records.Record:
        """`known`: what the stream says of its end."""
        return records.make(
            "end",
            request_id=self.request_id,
            attempt=self._attempt,
            outcome=end.outcome,
            reason=end.reason,
            end_ns=end_ns,
            loop_lag_max_ns=self.watch.lag.since(self._arrived_ns),
            consumer_hold_ns=self.consumer_hold_ns,
            server_timing=server_timing,
            upstream=self.went_to.get(self._attempt or 0),
            **known,
        )


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 < value < 2**31 else None
