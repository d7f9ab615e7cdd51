"""One completion, from its body to its end record, as a raw ASGI response.

Raw, because the stamps must be true: `written_ns` is when the transport was handed the bytes, tokens count as delivered
when the kernel has taken them, and the protocol below tells of the consumer's leaving at once, not at the next write.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl

from reference_server.answer_text import AnswerText, Ending
from reference_server.front_end import FrontEnd, Live
from reference_server.intake import Asked, ContextError, Intake
from reference_server.openai_api import (
    DONE,
    ApiError,
    ChunkBuilder,
    CompletionRequest,
    error_event,
    usage,
    whole_answer,
)
from sloscope import records
from sloscope.definitions import StreamEnd, classify_end
from sloscope.ids import is_request_id, new_request_id
from sloscope.units import NS_PER_S

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(slots=True)
class Hop:
    """What the protocol below knows of a request: stamps at the socket, whether it takes bytes, and how to close it."""

    arrived_ns: int
    transport: Any  # `write_ns`: when the last bytes were handed to it
    flow: FlowControl  # paused while the kernel has not taken what was written
    cut: Callable[[], None]  # closes the connection at once
    body_complete_ns: int | None = None
    socket_closed_ns: int | None = None  # the consumer closed it; None while it is open, and when we did
    cycle: Any = None  # uvicorn's, from the headers on
    closed: bool = False  # nobody will take the answer, or the rest of it
    on_closed: Callable[[], None] | None = None

    @property
    def unanswered(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def open(self) -> bool:
        """Whether someone has to be told when the connection is gone."""
        return self.unanswered or self.on_closed is not None

    def close(self, socket_closed_ns: int | None) -> None:
        """The connection is gone before the answer was. Its writers are woken by the protocol."""
        if self.closed:
            return
        self.closed, self.socket_closed_ns = True, socket_closed_ns
        if self.unanswered:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.on_closed is not None:
            self.on_closed()


class ClientLeftError(Exception):
    """The consumer was gone before its body was complete."""


class Answer(Response):
    def __init__(self, front_end: FrontEnd, chat: bool) -> None:
        # Response.__init__ would render a body; everything happens in __call__.
        self.background = None
        self.status_code = 200
        self._front = front_end
        self._chat = chat
        self._end = Ending()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        front = self._front
        self._hop: Hop = scope["extensions"]["sloscope"]
        self._asked_headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self._send_asgi = send
        self.request_id = self._identity()
        self._live = Live(self.request_id, cut=self._hop.cut)
        self._hop.on_closed = self._consumer_left
        if self._hop.closed:
            self._consumer_left()
        try:
            await self._answer(receive)
        finally:
            self._hop.on_closed = None
            front.close(self._live)
            self._record_end()

    @property
    def _created(self) -> int:
        """Now, in whole seconds of wall time: every choice of an answer asks once."""
        return self._front.clock.wall_ns() // NS_PER_S

    def _identity(self) -> str:
        claimed = self._asked_headers.get("x-sloscope-request-id", "")
        if is_request_id(claimed) and self._front.believe(claimed):
            return claimed
        made = new_request_id(self._front.clock.wall_ns())
        self._front.believe(made)
        return made

    async def _answer(self, receive: Receive) -> None:
        intake = Intake(self._front, self._asked_headers, self._chat)
        try:
            try:
                asked = await intake.understand(await self._read_body(receive))
            finally:
                await self._record_begin(intake.known)
                self._end.prompt_tokens = intake.known.get("prompt_tokens")
                self._end.min_tokens = intake.min_tokens
            await self._run(asked)
        except ClientLeftError:
            assert self._live.left, "the protocol tells before ASGI does"
        except ApiError as error:
            if isinstance(error, ContextError):
                self._front.refuse(self.request_id, "context")
            if not self._live.left:
                await self._refuse(error)

    # --- the request

    async def _read_body(self, receive: Receive) -> bytes:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeftError
            body += message.get("body", b"")
            if len(body) > self._front.max_body_bytes:
                raise ApiError(413, f"body: more than {self._front.max_body_bytes} bytes; accepted: at most that")
            if not message.get("more_body", False):
                if self._hop.body_complete_ns is None:
                    self._hop.body_complete_ns = self._front.clock.monotonic_ns()
                return bytes(body)

    # --- the answer

    def _consumer_left(self) -> None:
        """Whatever the answer waits for just now: its body, the engine's verdict, tokens, or the reader."""
        self._front.leave(self._live, "disconnect")

    async def _run(self, asked: Asked) -> None:
        front, live, completion = self._front, self._live, asked.completion
        if live.left:
            return
        live.streaming = completion.stream
        front.submit(
            live,
            prompt=asked.prompt,
            max_tokens=asked.max_tokens,
            stop_after=asked.stop_after,
            temperature=completion.temperature,
            top_p=completion.top_p,
            seed=int.from_bytes(os.urandom(7), "big") if completion.seed is None else completion.seed,
            mask_eos=front.mask_eos or completion.ignore_eos or asked.stop_after is not None,
            tenant=self._asked_headers.get("x-slo-tenant", "")[:256],
            arrived_ns=self._hop.arrived_ns,
            fault=asked.fault,
            request_class=asked.request_class,
            ttft_limit_ns=asked.ttft_limit_ns,
            itl_max_limit_ns=asked.itl_max_limit_ns,
        )
        await self._verdict()
        if live.left:
            return
        text = AnswerText(front, live, completion, self._end)
        answer_id = f"{'chatcmpl' if self._chat else 'cmpl'}-{self.request_id}"
        if completion.stream:
            await self._stream(answer_id, completion, text)
        else:
            await self._whole(answer_id, completion, text)

    async def _verdict(self) -> None:
        """Waits until the engine has taken the request in for good. ApiError if it does not."""
        live = self._live
        while not (live.accepted or live.left):
            if live.refused is not None:
                refused = live.refused
                status, code = (429, "rejected") if refused.retry else (400, refused.reason)
                raise ApiError(
                    status, refused.message, kind="rate_limit_error" if refused.retry else "invalid_request_error",
                    code=code, retry_after_s=refused.retry_after_s if refused.retry else None,
                )  # fmt: skip
            if live.error is not None:
                raise ApiError(500, live.error, kind="server_error", code="engine")
            await live.news.wait()
            live.news.clear()

    async def _stream(self, answer_id: str, completion: CompletionRequest, text: AnswerText) -> None:
        front, live, end = self._front, self._live, self._end
        null_usage = completion.include_usage and not completion.continuous_usage
        chunks = ChunkBuilder(answer_id, front.model, self._created, self._chat, null_usage)
        await self._start(200, _STREAM_HEADERS)
        if self._chat:
            await self._write(chunks.role())
        while not live.left:
            pieces = text.take()
            if pieces:
                continuous = completion.continuous_usage
                data = b"".join(
                    [chunks.text(piece, self._usage(tokens) if continuous else None) for piece, tokens in pieces]
                )
                await self._write(data)
            text.taken(pieces, self._hop.transport.write_ns)
            if text.finish_reason:
                break
            if live.error is not None and not live.mailbox:
                end.error = "engine"
                await self._write(error_event(live.error, "server_error", "engine"), last=True)
                return
            if not live.mailbox:
                await live.news.wait()
                live.news.clear()
        if live.left:
            return
        used, timings = self._usage(text.tokens), text.timings(self.request_id, self._hop.arrived_ns)
        split = completion.include_usage
        data = chunks.finish(
            text.finish_reason, used if completion.continuous_usage else None, None if split else timings
        )
        if split:
            data += chunks.usage(used, timings)
        await self._write(data + DONE, last=True)
        if not live.left:
            end.finish_reason, end.done = text.finish_reason, True

    async def _whole(self, answer_id: str, completion: CompletionRequest, text: AnswerText) -> None:
        front, live, end = self._front, self._live, self._end
        pieces: list[tuple[str, int]] = []
        while not live.left:
            pieces += text.take()
            if text.finish_reason:
                break
            if live.error is not None:
                raise ApiError(500, live.error, kind="server_error", code="engine")
            if not live.mailbox:
                await live.news.wait()
                live.news.clear()
        if live.left:
            return
        body = whole_answer(
            answer_id,
            front.model,
            self._created,
            self._chat,
            "".join(piece for piece, _ in pieces),
            text.finish_reason,
            self._usage(text.tokens),
            text.timings(self.request_id, self._hop.arrived_ns),
        )
        await self._start(200, [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))])
        await self._write(body, last=True)
        text.taken(pieces, self._hop.transport.write_ns)
        if not live.left:
            end.finish_reason, end.done = text.finish_reason, True

    def _usage(self, tokens: int) -> dict[str, int]:
        return usage(self._end.prompt_tokens or 0, tokens)

    async def _refuse(self, error: ApiError) -> None:
        body = error.body()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        if error.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % error.retry_after_s))
        if error.status == 413:
            headers.append((b"connection", b"close"))
        await self._start(error.status, headers)
        await self._write(body, last=True)

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        identity = [(b"x-sloscope-request-id", self.request_id.encode())]
        if external_id := self._asked_headers.get("x-request-id"):
            identity.append((b"x-request-id", external_id.encode("latin-1")))
        self._end.http_status = status
        await self._send_asgi({"type": "http.response.start", "status": status, "headers": headers + identity})

    async def _write(self, data: bytes, last: bool = False) -> None:
        """Returns when the kernel has taken the bytes, or nobody will."""
        message: Message = {"type": "http.response.body", "body": data, "more_body": not last}
        await self._send_asgi(message)
        if self._hop.flow.write_paused:
            self._live.blocked_ns = self._front.clock.monotonic_ns()
            await self._hop.flow.drain()
            self._live.blocked_ns = None
        if not self._live.left:
            self._end.bytes += len(data)

    # --- records

    async def _record_begin(self, known: Mapping[str, Any]) -> None:
        front, headers = self._front, self._asked_headers
        retry_of = headers.get("x-sloscope-retry-of", "")
        retries = _count(headers.get("x-stainless-retry-count", ""))
        await front.begin(
            records.make(
                "begin",
                request_id=self.request_id,
                attempt=0,
                observer="engine",
                role="server",
                clock_id=front.clock.clock_id,
                external_id=headers.get("x-request-id", "")[:256] or None,
                retry_of=retry_of if is_request_id(retry_of) else None,
                arrived_ns=self._hop.arrived_ns,
                body_complete_ns=self._hop.body_complete_ns,
                tenant=headers.get("x-slo-tenant", "")[:256] or None,
                labels={"retry_count": retries} if retries else None,
                path="/v1/chat/completions" if self._chat else "/v1/completions",
                **known,
            )
        )

    def _record_end(self) -> None:
        front, live, end = self._front, self._live, self._end
        end_ns = front.clock.monotonic_ns()
        outcome, reason = classify_end(
            StreamEnd(
                http_status=end.http_status,
                left=live.left,
                finishes={0: end.finish_reason} if end.finish_reason else {},
                done=end.done,
                error=end.error,
                events=end.events,
                min_tokens=end.min_tokens,
            )
        )
        front.ended(self.request_id, outcome)
        if live.left and self._hop.socket_closed_ns is not None:
            front.record(
                "late",
                request_id=self.request_id,
                attempt=0,
                observer="engine",
                socket_closed_ns=self._hop.socket_closed_ns,
                abort_sent=live.abort_sent,
            )
        front.record(
            "end",
            request_id=self.request_id,
            attempt=0,
            outcome=outcome,
            reason=reason,
            finish_reason=[end.finish_reason] if end.finish_reason else None,
            end_ns=end_ns,
            prompt_tokens=end.prompt_tokens,
            output_tokens=end.tokens,
            token_source="engine",
            http_status=end.http_status,
            bytes=end.bytes,
            loop_lag_max_ns=live.loop_lag_max_ns,
        )


def _count(text: str) -> int:
    """0 for what is no count; more digits than a record can hold are none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 7 else 0
