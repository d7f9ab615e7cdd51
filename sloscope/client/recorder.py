"""What a client saw of one request, recorded as it is seen.

The transport tells a `RequestRecorder` of bytes and of the end. Whoever reads the socket stamps the read and passes
the stamp in; nothing here reads a clock.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Mapping
from typing import Any, Protocol

import orjson

from sloscope import records
from sloscope.definitions import Ended, StreamEnd, Summary, classify_end, summarise
from sloscope.sse import StreamDecoder, StreamEvent, parse_body

_MAX_BODY_BYTES = 64 << 20  # of an answer that does not stream; beyond it the answer counts as malformed
_TYPE_INDEX = {name: index for index, name in enumerate(records.OUTPUT_TYPES)}


class Log(Protocol):
    """Where a recorder's records go: `sloscope.client.receipt_log.ReceiptLog`."""

    def has_waiting(self, recorder: RequestRecorder) -> None:
        """Receipts are there that no batch has taken; called again only after the next `take_batch`."""

    def has_ended(self, recorder: RequestRecorder) -> None: ...

    def abandon(self, recorder: RequestRecorder, end_ns: int) -> None: ...


class RequestRecorder:
    """One request as the client sees it: `response`, `receive`…, `end`. Text is parsed and dropped.

    Receipts stand in `t_ns`, `choice` and `type` (index into records.OUTPUT_TYPES), one entry per output event and
    choice; `tokens` beside them is None where the server does not state a count with each event.
    """

    __slots__ = (
        "_body",
        "_cumulative",
        "_decoder",
        "_done_ns",
        "_end",
        "_final_tokens",
        "_inflate",
        "_last_ns",
        "_log",
        "_waits",
        "_written",
        "bytes",
        "choice",
        "consumer_hold_ns",
        "end_ns",
        "ended",
        "error",
        "intended_ns",
        "loop_lag_max_ns",
        "model",
        "n_choices",
        "pending_since_ns",
        "prompt_tokens",
        "request_id",
        "send_ns",
        "streamed",
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
        streaming: bool,
        n_choices: int,
        min_tokens: int,
    ) -> None:
        self._log = log
        self.request_id = request_id
        self.send_ns = send_ns
        self.intended_ns = intended_ns
        self.streaming = streaming  # asked for
        self.streamed = False  # came as events
        self.n_choices = n_choices
        self.t_ns = array("q")
        self.choice = array("l")
        self.type = array("b")
        self.tokens: list[int | None] = []
        self.prompt_tokens: int | None = None
        self.model: str | None = None
        self.bytes = 0
        self.consumer_hold_ns: int | None = None
        self.loop_lag_max_ns: int | None = None
        self.end_ns: int | None = None
        self.ended: Ended | None = None
        self.error: str | None = None  # class of the exception that ended it
        self.pending_since_ns = 0
        self._waits = False  # stands in the log's queue
        self._written = 0  # receipts in the journal
        self._end = StreamEnd(n_choices=n_choices, finishes={}, min_tokens=min_tokens)
        self._decoder: StreamDecoder | None = None
        self._body: bytearray | None = None
        self._inflate: Any = None
        self._last_ns = send_ns
        self._done_ns: int | None = None
        self._final_tokens: int | None = None
        self._cumulative: dict[int, int] = {}  # choice → tokens so far as the server states them

    @property
    def http_status(self) -> int | None:
        return self._end.http_status

    @property
    def finish_reasons(self) -> list[str | None]:
        """Per choice, as sent; None for a choice that got none. Empty when no choice got one."""
        finishes = self._end.finishes
        return [finishes.get(index) for index in range(max(finishes) + 1)] if finishes else []

    def response(self, status: int, headers: Mapping[str, str]) -> None:
        """Status and headers (names in lower case) have come."""
        self._end.http_status = status
        if status >= 400:
            return
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "text/event-stream" or (self.streaming and kind != "application/json"):
            self.streamed = True
            self._decoder = StreamDecoder(orjson.loads)
        else:
            self._body = bytearray()
        encoding = headers.get("content-encoding", "").strip().lower()
        if encoding in ("gzip", "x-gzip", "deflate"):
            # 32 + 15: a gzip or a zlib header, whichever comes.
            self._inflate = zlib.decompressobj(32 + zlib.MAX_WBITS)
        elif encoding not in ("", "identity"):
            self._end.malformed = True
            self._decoder = self._body = None

    def receive(self, t_ns: int, data: bytes) -> None:
        """Body bytes that one read brought at `t_ns`."""
        self.bytes += len(data)
        self._last_ns = t_ns
        if self._inflate is not None:
            try:
                data = self._inflate.decompress(data)
            except zlib.error:
                self._end.malformed = True
                return
        if self._decoder is not None:
            for event in self._decoder.feed(data):
                self._event(t_ns, event)
        elif self._body is not None:
            if len(self._body) + len(data) > _MAX_BODY_BYTES:
                self._body = None
                self._end.malformed = True
            else:
                self._body += data

    def end(self, end_ns: int, transport: str = "eof", left: str = "", error: str | None = None) -> Ended:
        """The request is over; the first call decides. `transport` and `left` as in definitions.StreamEnd.

        After `[DONE]` the end is the read that brought it, however late the consumer closes.
        """
        if self.ended is not None:
            return self.ended
        if self._decoder is not None:
            # What end of stream completes was received with the last read.
            for event in self._decoder.finish():
                self._event(self._last_ns, event)
            self._decoder = None
        elif self._body is not None and not left and transport == "eof":
            self._whole_body(bytes(self._body))
            self._body = None
        self._end.transport = transport
        self._end.left = left
        self.error = error
        self.end_ns = end_ns if self._done_ns is None else min(end_ns, self._done_ns)
        self.ended = classify_end(self._end)
        self._log.has_ended(self)
        return self.ended

    def abandon(self, end_ns: int) -> None:
        if self.ended is None:
            self._log.abandon(self, end_ns)

    def close_window(self, end_ns: int) -> None:
        """The run is over and this request is not. Recorded, so that nobody takes it for one of a lost recorder."""
        if self.ended is None:
            self._decoder = self._body = None
            self.end_ns = end_ns
            self.ended = Ended("unfinished", "window_closed")
            self._log.has_ended(self)

    @property
    def output_tokens(self) -> int | None:
        """None for an answer that came whole and uncounted: it had no events."""
        if self._final_tokens is not None:
            return self._final_tokens
        if self._cumulative:
            return sum(self._cumulative.values())
        return len(self.t_ns) if len(self.t_ns) == self._end.events else None

    @property
    def token_source(self) -> str | None:
        if self._final_tokens is not None:
            return "usage"
        if self._cumulative:
            return "continuous_usage"
        return "assumed_one" if self.output_tokens is not None else None

    @property
    def event_tokens(self) -> list[int] | None:
        """Tokens of each event, None unless the server stated every one."""
        known = [count for count in self.tokens if count is not None]
        return known if known and len(known) == len(self.t_ns) else None

    def summary(self) -> Summary:
        """What a contract judges."""
        return summarise(
            self.send_ns,
            self.t_ns,
            self.choice,
            self.type,
            self.n_choices,
            self.output_tokens,
            self.event_tokens,
            completed_ns=self.end_ns if self.ended is not None and self.ended.outcome == "completed" else None,
        )

    def take_batch(self) -> records.Record | None:
        """A `chunks` record of the receipts not yet written; None if there are none."""
        # The type is appended last, so its length counts whole entries even while another thread appends.
        self._waits = False
        first, last = self._written, len(self.type)
        if first == last:
            return None
        self._written = last
        tokens = self.tokens[first:last]
        return records.make(
            "chunks",
            request_id=self.request_id,
            ordinal0=first,
            t_ns=self.t_ns[first:last].tolist(),
            choice=self.choice[first:last].tolist(),
            type=self.type[first:last].tolist(),
            tokens=tokens if any(count is not None for count in tokens) else None,
        )

    def end_record(self) -> records.Record:
        assert self.ended is not None
        return records.make(
            "end",
            request_id=self.request_id,
            outcome=self.ended.outcome,
            reason=self.ended.reason,
            finish_reason=self.finish_reasons or None,
            end_ns=self.end_ns,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            token_source=self.token_source,
            http_status=self.http_status,
            bytes=self.bytes,
            loop_lag_max_ns=self.loop_lag_max_ns,
            consumer_hold_ns=self.consumer_hold_ns,
        )

    def _event(self, t_ns: int, event: StreamEvent) -> None:
        if event.outputs:
            for output in event.outputs:
                self.t_ns.append(t_ns)
                self.choice.append(output.choice)
                self.tokens.append(None)
                self.type.append(_TYPE_INDEX[output.type])
            self._end.events += len(event.outputs)
            # Only after the receipts stand: a ticking thread clears the mark before it counts them.
            if not self._waits:
                self._waits = True
                self.pending_since_ns = t_ns
                self._log.has_waiting(self)
        if event.usage is not None:
            self._usage(event)
        if event.model is not None:
            self.model = event.model
        self._facts(event)
        if event.done and self._done_ns is None:
            self._done_ns = t_ns

    def _facts(self, event: StreamEvent) -> None:
        end = self._end
        if event.finishes:
            end.finishes = dict(end.finishes) | dict(event.finishes)
        if event.error is not None and end.error is None:
            end.error = event.error
        end.done = end.done or event.done
        end.malformed = end.malformed or event.malformed

    def _usage(self, event: StreamEvent) -> None:
        """Final usage gives the request's tokens, continuous usage those of each event."""
        assert event.usage is not None
        self.prompt_tokens = event.usage.prompt_tokens if event.usage.prompt_tokens is not None else self.prompt_tokens
        total = event.usage.completion_tokens
        if total is None:
            return
        over = len(self._end.finishes) >= self.n_choices
        if event.raw_usage_only and (over or not self._cumulative):
            self._final_tokens = total
            return
        if len(event.outputs) == 1:
            choice = event.outputs[0].choice
            count = total - self._cumulative.get(choice, 0)
            if count >= 0:
                self.tokens[-1] = count
                self._cumulative[choice] = total
        if self.n_choices == 1 and (event.finishes or over):
            self._final_tokens = total

    def _whole_body(self, body: bytes) -> None:
        event = parse_body(body, orjson.loads)
        self._end.events += len(event.outputs)
        self._facts(event)
        # Not every server names a finish reason; a whole answer with output in it ended properly.
        self._end.done = bool(event.outputs)
        if event.usage is not None:
            self.prompt_tokens = event.usage.prompt_tokens
            self._final_tokens = event.usage.completion_tokens
        self.model = event.model
