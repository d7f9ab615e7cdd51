"""One response as an observer receives it: body bytes with a receipt stamp in, receipts, tokens and the end out.

Every observer outside the engine records by this one rule, so that two of them on one wire say the same of the same
bytes. No clock, no socket and no journal: who reads the socket stamps the read and passes the stamp in. Text is parsed
and dropped.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from sloscope.definitions import Ended, StreamEnd, Summary, classify_end, summarise
from sloscope.records import OUTPUT_TYPES
from sloscope.sse import StreamDecoder, StreamEvent, parse_body
from sloscope.sse_pattern import Read

MAX_CHOICES = 1024  # beyond it a server's choice index is no reason to make room for the choices below
_MAX_REASON = 64  # characters of a finish reason
_MAX_EXPANSION = 8 << 20  # bytes that one read of compressed body may become
_MAX_MEMBERS = 1000  # of gzip in one read: each costs a copy of what follows it
_GZIP = b"\x1f\x8b"  # begins a member
_TYPE = {name: position for position, name in enumerate(OUTPUT_TYPES)}


class StreamRecord:
    """`response`, `receive`…, `finish`, `classify`.

    Receipts stand in `t_ns`, `choice` and `type` (index into records.OUTPUT_TYPES), one entry per output event and
    choice; `tokens` beside them is None where the server does not state a count with each event. The type is appended
    last: its length counts whole entries, in another thread too.

    `streaming` and `n_choices` are what the request asked for (None: not known) and have to be set before `response`.
    What cannot be read (a coding that the standard library lacks, more than `max_body_bytes` of a whole answer, more
    than the bound that one read may expand to) is not the service's fault: HTTP alone says how it ended, and its tokens
    are not known. A body that claims to be gzip and is not
    is a bad stream.

    `problems` names what was odd about the body.
    """

    __slots__ = (
        "_body",
        "_coding",
        "_cumulative",
        "_decoder",
        "_done_ns",
        "_facts",
        "_final_tokens",
        "_held",
        "_inflate",
        "_loads",
        "_max_body_bytes",
        "_opaque",
        "_stated",
        "body_bytes",
        "choice",
        "last_ns",
        "n_choices",
        "problems",
        "prompt_tokens",
        "streamed",
        "streaming",
        "t_ns",
        "tokens",
        "type",
    )

    def __init__(
        self, loads: Callable[[bytes], Any], max_body_bytes: int, streaming: bool | None = None, n_choices: int = 1
    ) -> None:
        self.streaming = streaming
        self.streamed = False  # came as events
        self.n_choices = n_choices
        self.t_ns = array("q")
        self.choice = array("i")
        self.type = array("b")
        self.tokens: list[int | None] = []
        self.prompt_tokens: int | None = None
        self.body_bytes = 0  # as sent
        self.problems: set[str] = set()
        self._facts = StreamEnd(finishes={})
        self._loads = loads
        self._max_body_bytes = max_body_bytes
        self._decoder: StreamDecoder | None = None
        self._body: bytearray | None = None  # of an answer that does not stream
        self._inflate: Any = None
        self._coding = ""
        self._held: bytes | None = None  # a first byte that may begin a further gzip member; None: none is read
        self._opaque = False
        self.last_ns = 0  # stamp of the last read
        self._done_ns: int | None = None
        self._final_tokens: int | None = None
        self._cumulative: dict[int, int] = {}  # choice → tokens so far as the server states them
        self._stated = 0  # the latest count of an event without output

    # --- the response

    def response(self, status: int, content_type: str, content_encoding: str) -> None:
        """The head has come."""
        self._facts.http_status = status
        if status >= 400:
            return
        kind = content_type.partition(";")[0].strip().lower()
        # Not every server names its stream one.
        self.streamed = kind == "text/event-stream" or (bool(self.streaming) and kind != "application/json")
        self._coding = content_encoding.strip().lower()
        if self._coding in ("gzip", "x-gzip", "deflate"):
            # 32 + 15: a gzip or a zlib header, whichever comes.
            self._inflate = zlib.decompressobj(32 + zlib.MAX_WBITS)
            self._held = None if self._coding == "deflate" else b""
        elif self._coding not in ("", "identity"):
            self._give_up("unknown_content_encoding")
            return
        if self.streamed:
            self._decoder = StreamDecoder(self._loads)
        else:
            self._body = bytearray()

    def receive(self, t_ns: int, data: bytes) -> None:
        """Body bytes that one read brought at `t_ns`."""
        self.body_bytes += len(data)
        self.last_ns = t_ns
        if self._inflate is not None:
            data = self._decompress(data)
        if self._decoder is not None:
            for event in self._decoder.feed(data):
                self._event(t_ns, event)
        elif self._body is not None:
            self._body += data
            if len(self._body) > self._max_body_bytes:
                self._give_up("response_above_inspect_limit")

    def receive_alike(self, reads: Sequence[Read]) -> int:
        """Takes as many of these reads, from the first on, as are each one event like an earlier one but for its text;
        how many. The fourth of a read is its stamp.
        """
        if self._decoder is None or self._inflate is not None:
            return 0
        count, output = self._decoder.alike(reads)
        if output is None or not count:
            return 0
        _, starts, stops, stamps, _, _ = zip(*reads[:count], strict=True)
        self.body_bytes += sum(stops) - sum(starts)
        self.last_ns = stamps[-1]
        self.t_ns.extend(stamps)
        self.choice.extend((output.choice,) * count)
        self.tokens += (None,) * count
        self.type.extend((_TYPE[output.type],) * count)
        return count

    def _decompress(self, data: bytes) -> bytes:
        """What a read becomes, by all the gzip members in it."""
        plain: list[bytes] = []
        room = _MAX_EXPANSION + 1  # one byte of it left over: a bound of 0 would be none
        for _ in range(_MAX_MEMBERS):
            if data and self._inflate.eof:
                data = self._next_member(data)
            if not data:
                return b"".join(plain)
            inflate = self._inflate
            try:
                plain.append(inflate.decompress(data, room))
            except zlib.error:
                if self._coding == "deflate":
                    # Some servers leave the zlib header out, and readers take that: it is not known to be rubbish.
                    self._give_up("bad_compression")
                else:
                    self._facts.malformed = True
                    self.problems.add("bad_compression")
                    self.stop()
                return b""
            room -= len(plain[-1])
            if inflate.unconsumed_tail or not room:
                break
            data = inflate.unused_data
            if not data:
                return b"".join(plain)
        self._give_up("bad_compression")
        return b""

    def _next_member(self, data: bytes) -> bytes:
        """The bytes with which a further gzip member begins, once it is known to be one; what is none is never read."""
        if self._held is None:
            return b""
        data = self._held + data
        if data.startswith(_GZIP):
            self._held = b""
            self._inflate = zlib.decompressobj(16 + zlib.MAX_WBITS)
            return data
        self._held = data if data == _GZIP[:1] else None
        return b""

    def _give_up(self, problem: str) -> None:
        self.problems.add(problem)
        self._opaque = True
        self.stop()

    def stop(self) -> None:
        """Understands nothing more."""
        self._decoder = self._body = self._inflate = None

    def _event(self, t_ns: int, event: StreamEvent) -> None:
        tokens = None if event.usage is None else self._usage(event)
        for choice, kind in event.outputs:
            self.t_ns.append(t_ns)
            self.choice.append(choice)
            self.tokens.append(tokens)
            self.type.append(_TYPE[kind])
        if event.finishes or event.done or event.error is not None or not event.recognised:
            self._said(event)
            if event.done and self._done_ns is None:
                self._done_ns = t_ns

    def _said(self, event: StreamEvent) -> None:
        """What an event says of the end, or that it is none of this API."""
        facts = self._facts
        if event.finishes:
            facts.finishes = {**facts.finishes, **{index: reason[:_MAX_REASON] for index, reason in event.finishes}}
        if facts.error is None:
            facts.error = event.error
        facts.done = facts.done or event.done
        if event.malformed:
            facts.malformed = True
            self.problems.add("malformed_event")
        elif not event.recognised:
            self.problems.add("unrecognised_event")

    def _usage(self, event: StreamEvent) -> int | None:
        """Tokens of this event. Final usage gives the request's, continuous usage those of each event."""
        assert event.usage is not None
        prompt, total = event.usage
        if prompt is not None:
            self.prompt_tokens = prompt
        if total is None:
            return None
        over = len(self._facts.finishes) >= self.n_choices
        if event.raw_usage_only and (over or not self._cumulative):
            self._final_tokens = total
            return None
        if self.n_choices == 1 and (event.finishes or over):
            self._final_tokens = total
        if not event.outputs and self.n_choices == 1:
            self._stated = total
        if len(event.outputs) != 1:
            return None
        # It counts up per choice.
        choice = event.outputs[0].choice
        count = total - self._cumulative.get(choice, 0)
        if count < 0:
            return None
        self._cumulative[choice] = total
        return count

    # --- the end

    def finish(self, body_complete: bool) -> None:
        """No byte will follow. `body_complete`: HTTP says that the body is whole."""
        decoder, body, opaque = self._decoder, self._body, self._opaque
        self.stop()
        facts = self._facts
        facts.events = len(self.t_ns)
        if decoder is not None:
            # What end of stream completes was received with the last read.
            for event in decoder.finish():
                self._event(self.last_ns, event)
            if decoder.oversized:
                self.problems.add("oversized_event")
            facts.events = len(self.t_ns)
            if self._final_tokens is None and facts.done and self._stated > sum(self._cumulative.values()):
                # The usage came on an empty delta, and [DONE] instead of a finish reason.
                self._final_tokens = self._stated
        elif body and body_complete:
            event = parse_body(bytes(body), self._loads)
            self._said(event)
            # Not every server names a finish reason; a whole answer with output in it ended properly.
            facts.events = len(event.outputs)
            facts.done = facts.events > 0
            if event.usage is not None:
                self.prompt_tokens, self._final_tokens = event.usage
        elif opaque:
            facts.done = facts.done or body_complete
            facts.events += self.body_bytes > 0

    def classify(self, transport: str, left: str, min_tokens: int) -> Ended:
        """The outcome, after `finish`. `transport` and `left` as in definitions.StreamEnd."""
        facts = self._facts
        facts.transport, facts.left, facts.min_tokens = transport, left, min_tokens
        facts.n_choices, facts.tokens = self.n_choices, self._final_tokens
        return classify_end(facts)

    def end_ns(self, end_ns: int) -> int:
        """End of stream: with `[DONE]` it is the read that brought it, however late the connection ends."""
        if self._done_ns is None:
            return end_ns
        return min(end_ns, max(self._done_ns, self.t_ns[-1]) if self.t_ns else self._done_ns)

    # --- what is known

    @property
    def opaque(self) -> bool:
        """What comes cannot be read."""
        return self._opaque

    @property
    def http_status(self) -> int | None:
        return self._facts.http_status

    @property
    def finish_reasons(self) -> list[str | None]:
        """Per choice, as sent; None for a choice that got none. Empty when no choice got one."""
        finishes = self._facts.finishes
        size = min(max(finishes) + 1, MAX_CHOICES) if finishes else 0
        return [finishes.get(index) for index in range(size)]

    @property
    def output_tokens(self) -> int | None:
        """None for an answer that came without events and uncounted: whole, or not to be read."""
        if self._final_tokens is not None:
            return self._final_tokens
        if self._cumulative:
            return sum(self._cumulative.values())
        return len(self.t_ns) if self.t_ns or not self._facts.events else None

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

    def chunks(self, first: int, last: int) -> dict[str, Any]:
        """The receipts [first, last) as fields of a `chunks` record."""
        tokens = self.tokens[first:last]
        return {
            "ordinal0": first,
            "t_ns": self.t_ns[first:last].tolist(),
            "choice": self.choice[first:last].tolist(),
            "type": self.type[first:last].tolist(),
            "tokens": None if tokens.count(None) == len(tokens) else tokens,
        }

    def ended(self) -> dict[str, Any]:
        """What the response says, as fields of an `end` record."""
        return {
            "finish_reason": self.finish_reasons or None,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "token_source": self.token_source,
            "http_status": self.http_status,
            "bytes": self.body_bytes,
        }

    def summary(self, start_ns: int, completed_ns: int | None) -> Summary:
        """What a contract judges. `completed_ns`: end of a completed answer."""
        return summarise(
            start_ns,
            self.t_ns,
            self.choice,
            self.type,
            self.n_choices,
            self.output_tokens,
            self.event_tokens,
            completed_ns=completed_ns,
        )
