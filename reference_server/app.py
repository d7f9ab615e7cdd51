"""The HTTP surface of the reference server."""

import asyncio
import contextlib
import time
from collections.abc import Generator
from typing import Any

import orjson
import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from reference_server.answer import Answer, Hop
from reference_server.faults import MAX_DELAY_NS
from reference_server.front_end import FrontEnd
from reference_server.openai_api import ApiError, shown

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LOOPBACK = ("127.0.0.1", "::1")
MAX_HEAD_BYTES = 64 << 10  # of a request's line and headers, as far as they come in more than one read
HEAD_TIMEOUT_S = 30.0  # for the first head of a connection from its opening, for later ones from their first byte
MAX_AHEAD_BYTES = 1 << 20
MAX_AHEAD = 64  # requests that one connection may send before the answer to the first is complete


class UntilClose(int):
    """The content length of a body that ends with its connection: no number of bytes is too many or too few."""

    def __sub__(self, other: object) -> "UntilClose":
        return self

    def __lt__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


class StampedTransport:
    """A transport that knows when the last bytes were handed to it, and whether its end was our wish.

    The stamp is taken before the call: on another core the consumer can have the bytes before `write` returns, and a
    receipt must not be older than what it receives.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.write_ns = 0
        self.closed_here = False

    def write(self, data: bytes) -> None:
        self.write_ns = time.monotonic_ns()
        self._transport.write(data)

    def close(self) -> None:
        self.closed_here = True
        self._transport.close()

    def abort(self) -> None:
        self.closed_here = True
        self._transport.abort()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class StampingProtocol(HttpToolsProtocol):
    """uvicorn's protocol with stamps where the bytes come in: ASGI itself tells of a request only after its headers.

    It tells every answer that is not complete when the consumer leaves; uvicorn tells only the latest of a connection.
    To see someone leave it must read, so it does not stop reading for requests that are sent ahead of their turn.
    The parser keeps a head or trailers of any length, so what gets no further is refused here.

    An HTTP/1.0 peer gets a body that ends with the connection. uvicorn would send it chunks, which are no part of
    HTTP/1.0 (RFC 9112 section 6.1); nginx speaks HTTP/1.0 to its upstreams unless told otherwise.
    """

    _received_ns = 0
    _no_progress = 0  # bytes of later reads since the last head, piece of a body or end of a request

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._hops: list[Hop] = []
        self._stamped = StampedTransport(transport)
        super().connection_made(self._stamped)  # type: ignore[arg-type]
        # Paused as soon as the kernel takes no more: what is not paused has left this process.
        transport.set_write_buffer_limits(high=0)
        self._await_head()

    def _await_head(self) -> None:
        """Who sends nothing, or no end of a head, holds a file descriptor that others may need."""
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _head_is_late(self) -> None:
        if any(hop.unanswered for hop in self._hops):
            self._await_head()
        else:
            self._cut()

    def data_received(self, data: bytes) -> None:
        self._received_ns = time.monotonic_ns()
        self._no_progress += len(data)
        super().data_received(data)
        if self._no_progress > MAX_HEAD_BYTES and not self._stamped.closed_here:
            self.send_400_response(f"headers: more than {MAX_HEAD_BYTES} bytes; accepted: at most that")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_timer.cancelled():
            self._await_head()
        self._hop = Hop(self._received_ns, self._stamped, self.flow, self._cut)
        self._hops = [hop for hop in self._hops if hop.open] + [self._hop]
        self.scope["extensions"] = {"sloscope": self._hop}  # type: ignore[dict-item]

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._head_timer.cancel()
        self._no_progress = 0
        self._hop.cycle = self.cycle
        self._read_on()
        if self.cycle is not None and self.scope.get("http_version") == "1.0":
            self.cycle.chunked_encoding = False
            self.cycle.expected_content_length = UntilClose()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._no_progress = 0
        self._read_on()

    def _read_on(self) -> None:
        """uvicorn stops reading for a request that is ahead of its turn, and would not see the consumer leave."""
        if not self.pipeline:
            return
        if len(self.pipeline) > MAX_AHEAD or sum(len(cycle.body) for cycle, _ in self.pipeline) > MAX_AHEAD_BYTES:
            self._cut()
        else:
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        self._hop.body_complete_ns = self._received_ns
        self._no_progress = 0
        super().on_message_complete()

    def eof_received(self) -> None:
        """A consumer that has said its last word is gone: a half-closed socket looks no different from a closed one."""
        if any(hop.unanswered for hop in self._hops):
            self._end(time.monotonic_ns())

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer.cancel()
        ours = self._stamped.closed_here and exc is None
        closed_ns = None if ours else time.monotonic_ns()
        for hop in self._hops:
            # An end without an error comes after the last byte was taken, so it concerns incomplete answers only.
            if exc is not None or hop.unanswered:
                hop.close(closed_ns)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Everybody has been answered or cut; for the rest of a body uvicorn would wait, and then cancel its task."""
        if self.cycle is not None and not self.cycle.response_complete and self.cycle.more_body:
            self._cut()
        else:
            super().shutdown()

    def _cut(self) -> None:
        self._end(None)

    def _end(self, socket_closed_ns: int | None) -> None:
        for hop in self._hops:
            hop.close(socket_closed_ns)
        self._stamped.abort()


class Server(uvicorn.Server):
    """uvicorn that leaves signals to its caller, who decides the order of the end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def make_server(app: FastAPI, backlog: int) -> Server:
    return Server(
        uvicorn.Config(
            app,
            http=StampingProtocol,
            lifespan="off",
            ws="none",
            log_level="error",  # a warning a bad request would be a way to fill a disk
            access_log=False,
            server_header=False,
            backlog=backlog,
            timeout_graceful_shutdown=5,
        )
    )


def make_app(front_end: FrontEnd) -> FastAPI:
    app = FastAPI(title="sloscope reference server", docs_url=None, redoc_url=None, openapi_url=None)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request) -> Response:
        return Answer(front_end, chat=True)

    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request) -> Response:
        return Answer(front_end, chat=False)

    @app.get("/v1/models", response_model=None)
    async def models() -> Response:
        model = {"id": front_end.model, "object": "model", "created": front_end.created, "owned_by": "sloscope"}
        return _json(200, {"object": "list", "data": [model | {"max_model_len": front_end.max_context}]})

    @app.get("/health", response_model=None)
    async def health() -> Response:
        if front_end.engine.lost.is_set():
            return _json(503, {"status": "engine lost"})
        return _json(503, {"status": "stopping"}) if front_end.stopping else _json(200, {"status": "ok"})

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return Response(await front_end.scrape(), media_type=None, headers={"content-type": METRICS_TYPE})

    @app.post("/faults", response_model=None)
    async def faults(request: Request) -> Response:
        """{"stall_ms": 200}: the next step takes that much more. With "decoding": true, the next that decodes."""
        if request.client is None or request.client.host not in _LOOPBACK:
            raise ApiError(403, "faults: only from the loopback address")
        if not front_end.allow_faults:
            raise ApiError(403, "faults: are off; accepted: only with sloscope serve --allow-faults")
        front_end.stall(*_stall(await request.body()))
        return _json(200, {"status": "ok"})

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return Response(error.body(), error.status, media_type="application/json")

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        body = ApiError(error.status_code, f"{request.method} {request.url.path[:200]}: {error.detail}").body()
        return Response(body, error.status_code, error.headers, "application/json")

    return app


def _stall(body: bytes) -> tuple[int, bool]:
    """Nanoseconds, and whether only a step that decodes is to be stalled."""
    accepted = (
        f'accepted: {{"stall_ms": a number above 0, at most {MAX_DELAY_NS // 1_000_000}}}, '
        'beside it "decoding": true or false'
    )
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise ApiError(400, f"body: not JSON; {accepted}") from None
    if not isinstance(document, dict) or not document.keys() <= {"stall_ms", "decoding"}:
        raise ApiError(400, f"body: {shown(document)} is not accepted; {accepted}")
    stall_ms, decoding = document.get("stall_ms"), document.get("decoding", False)
    if not isinstance(stall_ms, (int, float)) or isinstance(stall_ms, bool) or not 0 < stall_ms * 1e6 <= MAX_DELAY_NS:
        raise ApiError(400, f"stall_ms: {shown(stall_ms)} is not accepted; {accepted}", param="stall_ms")
    if not isinstance(decoding, bool):
        raise ApiError(400, f"decoding: {shown(decoding)} is not accepted; {accepted}", param="decoding")
    return round(stall_ms * 1e6), decoding


def _json(status: int, body: Any) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")
