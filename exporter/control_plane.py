"""The control plane process: `python -m exporter.control_plane`, started by the supervisor.

Metrics, receipts and questions over HTTP. No stream passes here, and this process gives way to the one where they do.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
import uvicorn
import uvloop
from fastapi import FastAPI, HTTPException, Request, Response
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from exporter.engine_metrics import EngineMetrics
from exporter.link import DataPlaneLink
from exporter.questions import OutOfTimeError, Questions, parse_time_ns, published
from exporter.receipts import MAX_BATCH, OwnJournals, ReceiptError, ReceiptRate, Receipts
from exporter.settings import Settings
from sloscope import __version__
from sloscope.clock import Clock, SystemClock
from sloscope.errors import ConfigError, QueryError, SloscopeError
from sloscope.exposition import MetricStore, Row
from sloscope.journal import JournalWriter
from sloscope.recorder import encode

_POLL_S = 1.0
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]/@?#\s]+)(?::[0-9]{0,5})?")
_OPEN_PATHS = frozenset({"/health"})
_RECEIPTS = "/v1/receipts"
_RECEIPTS_A_TURN = 20
_PREFLIGHT_S = 600  # how long a browser may remember what it was allowed
_TEXT = "text/plain; version=0.0.4; charset=utf-8"


class ControlPlane:
    def __init__(self, settings: Settings, clock: Clock) -> None:
        self.settings = settings
        self.contract = settings.load_contract()
        self.store = MetricStore("sidecar", self.contract, settings.max_label_values)
        self.link = DataPlaneLink(settings.socket_path, self.store)
        self.receipts = Receipts(
            self.contract,
            self.store,
            lambda: JournalWriter(Path(settings.events), "client", clock, encode),
            clock,
            ReceiptRate(clock, settings.receipts_rate, settings.receipts_burst),
            OwnJournals(Path(settings.events)),
        )
        self.engines = EngineMetrics(settings, self.store, clock)
        self.questions = Questions(Path(settings.events), self.contract)
        self.data_plane_answers = False
        self._from_sql: list[Row] = []  # of the latest turn that went well
        self.store.add_source(lambda: self._from_sql)
        self._clock = clock
        self._publish_contract()

    def _publish_contract(self) -> None:
        labels = (__version__, self.contract.hash, self.contract.observer)
        self.store.set("sloscope_build_info", 1, labels)
        for name, row in self.contract.classes.items():
            self.store.set("sloscope_contract_objective_ratio", row.objective, (name,))
            for limit, ns in row.limits.declared().items():
                self.store.set("sloscope_contract_limit_seconds", ns / 1e9, (name, limit))

    async def metrics(self) -> bytes:
        """One snapshot. Never fails for the data plane's sake: its latest one stands, and that is counted."""
        await self.poll(count_failure=True)
        self.receipts.count_journal()
        return self.store.render()

    async def poll(self, count_failure: bool = False) -> None:
        self.data_plane_answers = await self.link.poll()
        if count_failure and not self.data_plane_answers:
            self.store.inc("sloscope_snapshot_failures_total")

    def take_totals(self, totals: dict[str, int]) -> None:
        """What the supervisor counts."""
        self.store.set("sloscope_data_plane_restarts_total", totals["data_plane_restarts"])
        self.store.set("sloscope_recovered_requests_total", totals["recovered_requests"])

    async def keep_polling(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            await self.poll()

    async def keep_publishing(self) -> None:
        """The `sloscope_sql_` series. A question that fails is counted, and asked again at the next turn; meanwhile the
        results before it stand, with the time of their making.
        """
        while True:
            try:
                window_ns, now_ns = self.settings.sql_window_ns, self._clock.wall_ns()
                self._from_sql = await asyncio.to_thread(published, self.questions, window_ns, now_ns)
            except Exception:  # a disk, a damaged file, a question out of time: no reason to stop serving
                self.store.inc("sloscope_sql_failures_total")
            await asyncio.sleep(self.settings.sql_every_ns / 1e9)


def create_app(plane: ControlPlane) -> FastAPI:
    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(plane.keep_polling())]
        if plane.settings.sql_every_ns:
            tasks.append(asyncio.create_task(plane.keep_publishing()))
        tasks += [asyncio.create_task(poller) for poller in plane.engines.pollers()]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await plane.link.close()
        plane.receipts.close()

    app = FastAPI(title="sloscope sidecar", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)

    @app.middleware("http")
    async def check_token(request: Request, call_next: Any) -> Response:
        token = plane.settings.token
        if token and request.url.path not in _OPEN_PATHS:
            sent = request.headers.get("authorization", "")
            if not hmac.compare_digest(sent.encode(), f"Bearer {token}".encode()):
                return _error(401, "authorization: accepted: Bearer and the token of this sidecar")
        answer: Response = await call_next(request)
        return answer

    # Outside of the token: a preflight carries none, and a page has to be able to read that its token is wrong.
    @app.middleware("http")
    async def answer_pages(request: Request, call_next: Any) -> Response:
        origin = request.headers.get("origin")
        if origin is None or request.url.path != _RECEIPTS:
            answer: Response = await call_next(request)
            return answer
        # A page can post without asking first, so what is not allowed is refused and not just left unread.
        if not _is_welcome(origin, request, plane.settings.cors_origins):
            return _error(403, f"origin: {origin[:80]!r} is not accepted; accepted: what --cors-origin names")
        answer = Response(status_code=204) if request.method == "OPTIONS" else await call_next(request)
        answer.headers["access-control-allow-origin"] = origin
        answer.headers["access-control-expose-headers"] = "retry-after"
        answer.headers["vary"] = "origin"
        if request.method == "OPTIONS":
            answer.headers["access-control-allow-methods"] = "POST"
            answer.headers["access-control-allow-headers"] = "authorization, content-type"
            answer.headers["access-control-max-age"] = str(_PREFLIGHT_S)
        return answer

    # A page's name can be pointed at a loopback address once the page is loaded. Its browser then takes our answers for
    # the page's own, and only Host tells. Without a token the listener is loopback; with one, no such page has it, and
    # a proxy in front may keep its own name.
    @app.middleware("http")
    async def check_host(request: Request, call_next: Any) -> Response:
        host = request.headers.get("host")  # every browser sends it
        if host is not None and not plane.settings.token and not _is_ours(host, plane.settings.cors_origins):
            return _error(
                403,
                f"host: {host[:80]!r} is not accepted; accepted: localhost, a loopback address, the host of a"
                " --cors-origin, or any with a token",
            )
        answer: Response = await call_next(request)
        return answer

    @app.get("/health")
    async def health() -> dict[str, object]:
        return {"status": "ok" if plane.data_plane_answers else "degraded", "data_plane": plane.data_plane_answers}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await plane.metrics(), media_type=_TEXT)

    @app.post("/v1/receipts")
    async def receipts(request: Request) -> Response:
        sender = request.client.host if request.client is not None else ""
        if wait_s := plane.receipts.rate.wait_s(sender):
            plane.receipts.refused_unread("rate")
            answer = _error(
                429, f"receipts: {sender} reports more than this sidecar takes; accepted again in {wait_s} s"
            )
            answer.headers["retry-after"] = str(wait_s)
            return answer
        most = plane.settings.receipts_max_bytes
        body = await _body(request, most)
        if body is None:
            plane.receipts.refused_unread("too_large")
            return _error(413, f"body: accepted: at most {most} bytes")
        return await _take_receipts(plane, sender, body)

    @app.get("/api/contract")
    async def contract() -> Response:
        return Response(plane.contract.canonical(), media_type="application/json")

    @app.get("/api/q")
    async def questions() -> Response:
        return JSONResponse(await asyncio.to_thread(plane.questions.list))

    @app.get("/api/q/{name}")
    async def question(name: str, request: Request) -> Response:
        return await _answer(plane, name, dict(request.query_params))

    return app


def _is_ours(host: str, origins: tuple[str, ...]) -> bool:
    """Whether a Host header names a loopback address, or a site that the operator named."""
    found = _HOST.fullmatch(host)
    if found is None:
        return False
    name = found[1].strip("[]").lower()
    if name == "localhost" or name.endswith(".localhost") or name in {urlsplit(each).hostname for each in origins}:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _is_welcome(origin: str, request: Request, origins: tuple[str, ...]) -> bool:
    """Named, or the page came from this very address, perhaps through a proxy that ends TLS. That the address is ours
    `check_host` has seen to.
    """
    return origin in origins or origin.partition("://")[2] == request.headers.get("host", "no host")


def _error(status: int, text: str) -> Response:
    return JSONResponse({"error": text}, status)


async def _body(request: Request, most: int) -> bytes | None:
    """The body, read no further than `most` bytes; None if it has more."""
    pieces: list[bytes] = []
    size = 0
    try:
        async for piece in request.stream():
            size += len(piece)
            if size > most:
                return None
            pieces.append(piece)
    except ClientDisconnect:
        # Nobody reads this, and nobody is to read a traceback for each page that was closed too early.
        raise HTTPException(400, "body: its sender left before its end") from None
    return b"".join(pieces)


async def _take_receipts(plane: ControlPlane, sender: str, body: bytes) -> Response:
    plane.receipts.rate.took(sender, 1, len(body))
    try:
        sent = orjson.loads(body)
    except ValueError:
        return _error(400, "body: is not JSON")
    if isinstance(sent, dict) and "receipts" in sent:
        batch = sent["receipts"]
        if not isinstance(batch, list) or not batch or len(batch) > MAX_BATCH or len(sent) > 1:
            return _error(400, f'body: accepted: a receipt or {{"receipts": [1 to {MAX_BATCH} of them]}}')
    else:
        batch = [sent]
    plane.receipts.rate.took(sender, len(batch) - 1)
    rejected: list[dict[str, object]] = []
    for index, receipt in enumerate(batch):
        try:
            plane.receipts.take(receipt)
        except ReceiptError as error:
            rejected.append({"index": index, "error": str(error)})
        if index % _RECEIPTS_A_TURN == _RECEIPTS_A_TURN - 1:
            await asyncio.sleep(0)  # a batch can take a second: scrapes go between
    accepted = len(batch) - len(rejected)
    return JSONResponse({"accepted": accepted, "rejected": rejected}, 200 if accepted else 400)


async def _answer(plane: ControlPlane, name: str, params: dict[str, str]) -> Response:
    try:
        start, end = params.pop("from", None), params.pop("to", None)
        if (start is None) != (end is None):
            return _error(400, "from, to: accepted: both or none")
        window = (parse_time_ns(start, "from"), parse_time_ns(end, "to")) if start and end else None
        observer = params.pop("observer", None)
        known = {row["name"] for row in await asyncio.to_thread(plane.questions.list)}
        if name not in known:
            return _error(404, f"question: {name[:60]!r} is unknown; accepted: {', '.join(sorted(known))}")
        rows = await asyncio.to_thread(plane.questions.ask, name, window, observer, params)
    except OutOfTimeError as error:
        return _error(504, str(error))
    except (QueryError, ConfigError) as error:
        return _error(400, str(error))
    except (SloscopeError, OSError) as error:  # a full disk, a directory that is gone: not what was asked
        return _error(503, f"events: {error}")
    return Response(orjson.dumps(rows), media_type="application/json")


class Server(uvicorn.Server):
    """The control plane over HTTP. Signals are the process's own business, see `serve`."""

    def __init__(self, plane: ControlPlane) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(plane),
                log_level="warning",
                access_log=False,
                lifespan="on",
                # An address that a sender gives itself would be another one for each report, and have its own rate.
                proxy_headers=False,
                timeout_graceful_shutdown=2,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(settings: Settings, listen_fd: int) -> None:
    loop = asyncio.get_running_loop()
    plane = ControlPlane(settings, SystemClock())
    server = Server(plane)

    def stop() -> None:
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    stdin = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    listening = loop.create_task(_listen_to_supervisor(plane, stdin, stop))
    announcing = loop.create_task(_say_ready(server))
    await server.serve(sockets=[socket.socket(fileno=listen_fd)])
    for task in (listening, announcing):
        task.cancel()


async def _listen_to_supervisor(plane: ControlPlane, stdin: asyncio.StreamReader, stop: Any) -> None:
    while line := await stdin.readline():
        plane.take_totals(orjson.loads(line))
    stop()


async def _say_ready(server: Server) -> None:
    while not server.started:
        await asyncio.sleep(0.01)
    sys.stdout.write("ready\n")
    sys.stdout.flush()


def main() -> None:
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as stdin:  # the rest belongs to the loop
        body = orjson.loads(stdin.readline())
    uvloop.run(serve(Settings.from_json(body["settings"]), body["listen_fd"]))


if __name__ == "__main__":
    main()
