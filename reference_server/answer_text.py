"""The tokens of one answer to pieces of text, and to the stamps of its output events."""

from dataclasses import dataclass
from typing import Any

from reference_server.front_end import FrontEnd, Live, Token
from reference_server.openai_api import CompletionRequest


@dataclass(slots=True)
class Ending:
    """What is known of the end so far; becomes the end record."""

    http_status: int | None = None
    finish_reason: str = ""
    error: str | None = None
    done: bool = False
    events: int = 0  # output events written
    tokens: int = 0  # output tokens written
    prompt_tokens: int | None = None
    bytes: int = 0
    min_tokens: int = 1


class AnswerText:
    """Tokens of one request to pieces of text, and to the stamps of its output events.

    A piece is one output event: the text that became safe to send with a token. Tokens whose text is held back are
    counted by the event that brings it.
    """

    def __init__(self, front_end: FrontEnd, live: Live, completion: CompletionRequest, end: Ending) -> None:
        self._front = front_end
        self._live = live
        self._end = end
        self._text = front_end.tokenizer.text_stream(completion.stop)
        self._last: Token | None = None
        self._first_computed_ns: int | None = None
        self.tokens = 0
        self.finish_reason = ""

    def take(self) -> list[tuple[str, int]]:
        """What has come: (text, tokens so far) of each output event."""
        pieces = []
        mailbox, emissions = self._live.mailbox, self._live.emissions
        while mailbox and not self.finish_reason:
            token = mailbox.popleft()
            self._last = token
            if self._first_computed_ns is None:
                self._first_computed_ns = token.computed_ns
            piece = ""
            if token.visible:
                self.tokens += 1
                piece = self._text.push(token.token_id)
                if self._text.stopped_by is not None:
                    self.finish_reason = "stop"
                    if not token.finish:
                        self._front.finish(self._live)
            if token.finish and not self.finish_reason:
                self.finish_reason = token.finish
                piece += self._text.finish()
            if piece:
                emissions.add(self.tokens, token)
                pieces.append((piece, self.tokens))
        return pieces

    def written(self, pieces: list[tuple[str, int]], at_ns: int) -> None:
        """The pieces went on their way at `at_ns`: stamp them, unless the consumer had left."""
        if not pieces or self._live.left:
            return
        self._live.emissions.stamp(at_ns)
        self._live.delivered = self._end.tokens = pieces[-1][1]
        self._end.events += len(pieces)

    def timings(self, request_id: str, arrived_ns: int) -> dict[str, Any]:
        """The engine's own durations, in ms, for the last chunk."""
        live, first, last = self._live, self._first_computed_ns, self._last
        assert first is not None and last is not None and live.queued_ns is not None and live.started_ns is not None
        return {
            "request_id": request_id,
            "queue_ms": (live.started_ns - live.queued_ns) / 1e6,
            "prefill_ms": (first - live.started_ns) / 1e6,
            "decode_ms": (last.computed_ns - first) / 1e6,
            "ttft_ms": (first - arrived_ns) / 1e6,
        }
