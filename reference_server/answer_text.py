"""The tokens of one answer to pieces of text, and to the stamps of its output events."""

from dataclasses import dataclass
from typing import Any

from reference_server.front_end import FrontEnd, Live, Token
from reference_server.openai_api import CompletionRequest

# Tokens of one write. A slow reader is seen to take some of what is there before it has taken all.
TOKENS_AT_ONCE = 16


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
        self._taken = 0  # tokens out of the mailbox
        self.tokens = 0  # of those, output
        self.finish_reason = ""

    def take(self) -> list[tuple[str, int]]:
        """What has come, up to some tokens: (text, tokens so far) of each output event."""
        pieces = []
        mailbox, emissions = self._live.mailbox, self._live.emissions
        for _ in range(min(len(mailbox), TOKENS_AT_ONCE)):
            if self.finish_reason:
                break
            token = mailbox.popleft()
            self._last = token
            self._taken += 1
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

    def taken(self, pieces: list[tuple[str, int]], written_ns: int) -> None:
        """The socket took the pieces, which were written at `written_ns`: stamp them, unless the consumer had left.

        A token that gave no piece has no reader to wait for: it is hidden, or its text is held back until others come.
        """
        if self._live.left:
            return
        if pieces:
            self._live.emissions.stamp(written_ns)
            self._end.tokens = pieces[-1][1]
            self._end.events += len(pieces)
        self._front.delivered(self._live, self._taken)

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
