"""What a client saw of one request, recorded as it is seen.

The transport tells a `RequestRecorder` of bytes and of the end. Whoever reads the socket stamps the read and passes
the stamp in; nothing here reads a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import orjson

from sloscope import records
from sloscope.contract import Resolved
from sloscope.definitions import Ended, Summary
from sloscope.stream_record import StreamRecord

_MAX_BODY_BYTES = 64 << 20  # of an answer that does not stream; beyond it the answer is not read


class Log(Protocol):
    """Where a recorder's records go: `sloscope.client.receipt_log.ReceiptLog`."""

    def has_waiting(self, recorder: RequestRecorder) -> None:
        """Receipts are there that no batch has taken; called again only after the next `take_batch`."""

    def may_end(self, recorder: RequestRecorder) -> bool:
        """Whether this is the first to end it."""

    def has_ended(self, recorder: RequestRecorder) -> None: ...

    def abandon(self, recorder: RequestRecorder, end_ns: int) -> None: ...


class RequestRecorder:
    """One request as the client sees it: `response`, `receive`…, `end`.

    Receipts stand in `t_ns`, `choice`, `type` and `tokens`, as in StreamRecord.
    """

    __slots__ = (
        "_lag_since",
        "_log",
        "_min_tokens",
        "_stream",
        "_waits",
        "_written",
        "begun",
        "choice",
        "consumer_hold_ns",
        "end_ns",
        "ended",
        "error",
        "intended_ns",
        "loop_lag_max_ns",
        "n_choices",
        "pending_since_ns",
        "request_id",
        "resolved",
        "send_ns",
        "streaming",
        "t_ns",
        "tokens",
        "type",
    )

    def __init__(
        self,
        log: Log,
        request_id: str,
        send_ns: int,
        intended_ns: int | None,
        streaming: bool | None,
        n_choices: int | None,
        min_tokens: int,
        lag_since: Callable[[int], int] | None = None,
        resolved: Resolved | None = None,
        begun: Mapping[str, Any] | None = None,
    ) -> None:
        self._log = log
        self._lag_since = lag_since
        self.request_id = request_id
        self.send_ns = send_ns
        self.intended_ns = intended_ns
        self.streaming = streaming  # asked for; None: the request could not be read
        self.n_choices = n_choices  # likewise
        self.resolved = resolved  # None: nothing was promised
        self.begun = begun or {}  # further fields of its begin
        self._min_tokens = min_tokens
        self._stream = stream = StreamRecord(orjson.loads, _MAX_BODY_BYTES, streaming, n_choices or 1)
        self.t_ns, self.choice, self.type, self.tokens = stream.t_ns, stream.choice, stream.type, stream.tokens
        self.consumer_hold_ns: int | None = None
        self.loop_lag_max_ns: int | None = None
        self.end_ns: int | None = None
        self.ended: Ended | None = None
        self.error: str | None = None  # class of the exception that ended it
        self.pending_since_ns = 0
        self._waits = False  # stands in the log's queue
        self._written = 0  # receipts in the journal

    @property
    def streamed(self) -> bool:
        """The answer came as events."""
        return self._stream.streamed

    @property
    def http_status(self) -> int | None:
        return self._stream.http_status

    @property
    def finish_reasons(self) -> list[str | None]:
        return self._stream.finish_reasons

    @property
    def prompt_tokens(self) -> int | None:
        return self._stream.prompt_tokens

    @property
    def output_tokens(self) -> int | None:
        return self._stream.output_tokens

    @property
    def token_source(self) -> str | None:
        return self._stream.token_source

    @property
    def event_tokens(self) -> list[int] | None:
        return self._stream.event_tokens

    def response(self, status: int, headers: Mapping[str, str]) -> None:
        """Status and headers (names in lower case) have come."""
        self._stream.response(status, headers.get("content-type", ""), headers.get("content-encoding", ""))

    def receive(self, t_ns: int, data: bytes) -> None:
        """Body bytes that one read brought at `t_ns`."""
        self._stream.receive(t_ns, data)
        # Only after the receipts stand: a ticking thread clears the mark before it counts them.
        if not self._waits and len(self.type) > self._written:
            self._wait(t_ns)

    def _wait(self, t_ns: int) -> None:
        self._waits = True
        self.pending_since_ns = t_ns
        self._log.has_waiting(self)

    def end(self, end_ns: int, transport: str = "eof", left: str = "", error: str | None = None) -> Ended | None:
        """The request is over; the first call decides. `transport` and `left` as in definitions.StreamEnd. None: its
        log was closed before.

        After `[DONE]` the end is the read that brought it, however late the consumer closes.
        """
        if not self._log.may_end(self):
            return self.ended
        if left == "disconnect" and self._is_undecodable():
            left = ""  # the service's doing: no reader gets beyond it
        self._stream.finish(body_complete=transport == "eof" and not left)
        self.error = error
        self.end_ns = self._stream.end_ns(end_ns)
        self.ended = self._stream.classify(transport, left, self._min_tokens)
        self._has_ended()
        return self.ended

    def _is_undecodable(self) -> bool:
        return "bad_compression" in self._stream.problems and not self._stream.opaque

    def _has_ended(self) -> None:
        if self._lag_since is not None:
            self.loop_lag_max_ns = self._lag_since(self.send_ns)
        self._log.has_ended(self)

    def abandon(self, end_ns: int) -> None:
        if self.ended is None:
            self._log.abandon(self, end_ns)

    def close_window(self, end_ns: int) -> None:
        """The run is over and this request is not. Recorded, so that nobody takes it for one of a lost recorder."""
        if self._log.may_end(self):
            self._stream.stop()
            self.end_ns = end_ns
            self.ended = Ended("unfinished", "window_closed")
            self._has_ended()

    def disown(self) -> None:
        """Another process records it, or nobody does any more: nothing of it goes to the log."""
        self._waits = True

    def summary(self) -> Summary:
        """What a contract judges."""
        completed = self.ended is not None and self.ended.outcome == "completed"
        return self._stream.summary(self.send_ns, self.end_ns if completed else None)

    def take_batch(self) -> list[records.Record]:
        """A `chunks` record of the receipts not yet written; empty if there are none."""
        self._waits = False
        first, last = self._written, len(self.type)
        if first == last:
            return []
        self._written = last
        return [records.make("chunks", request_id=self.request_id, **self._stream.chunks(first, last))]

    def end_record(self) -> records.Record:
        assert self.ended is not None
        return records.make(
            "end",
            request_id=self.request_id,
            outcome=self.ended.outcome,
            reason=self.ended.reason,
            end_ns=self.end_ns,
            loop_lag_max_ns=self.loop_lag_max_ns,
            consumer_hold_ns=self.consumer_hold_ns,
            **self._stream.ended(),
        )
