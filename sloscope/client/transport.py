"""httpx transports that record what a consumer receives, around any transport that does the work.

    client = OpenAI(http_client=httpx.Client(transport=ReceiptTransport("events", contract="contract.toml")))

Works with httpx and httpx2, sync and async. A consumer pulls: a receipt is stamped when the pull that brought it
returns, and the time between handing bytes over and the next pull is summed in `consumer_hold_ns`. Nothing that the
observer does or fails to do reaches the call: its own errors are counted in `observer_errors` and dropped.

A stream that the consumer leaves before its end is `cancelled(disconnect)`. Who knows better says so:

    with stop_reason("voluntary"):      # or "client_timeout"
        stream.close()
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import orjson

from sloscope import contract as contracts
from sloscope import records
from sloscope.client.loop_lag import LagProbe, LoopProbes
from sloscope.client.receipt_log import ReceiptLog
from sloscope.client.recorder import RequestRecorder
from sloscope.contract import Contract, Limits, Resolved
from sloscope.errors import ConfigError, ContractError
from sloscope.ids import is_request_id, new_request_id
from sloscope.stream_record import MAX_CHOICES

if TYPE_CHECKING:
    from sloscope.client.receipt_posting import ReceiptPosting

ID_HEADER = "x-sloscope-request-id"
RETRY_HEADER = "x-sloscope-retry-of"
STOP_REASONS = ("voluntary", "client_timeout", "disconnect")
_SENT_AGAIN_BY_REDIRECT = (307, 308)  # with its body; others are followed by a GET
_FOLLOWED_WITHIN_NS = 1_000_000_000
_MAX_KNOWN_IDS = 10_000
_RETRY_COUNT = "x-stainless-retry-count"  # the openai package counts its retries here
_LABEL_TYPES = (str, int, float, bool)
_READABLE_ENCODINGS = frozenset({"gzip", "x-gzip", "deflate", "identity"})

_stop_reason: ContextVar[str] = ContextVar("sloscope_stop_reason", default="")


@contextmanager
def stop_reason(reason: str) -> Iterator[None]:
    """Streams that are closed or cancelled inside, in this thread or task, ended for this reason.

    Raises ValueError for a reason other than voluntary, client_timeout and disconnect.
    """
    if reason not in STOP_REASONS:
        raise ValueError(f"stop_reason: {reason!r} is not accepted; accepted: {', '.join(STOP_REASONS)}")
    token = _stop_reason.set(reason)
    try:
        yield
    finally:
        _stop_reason.reset(token)


class _Attempt(NamedTuple):
    """The request that this thread or task sent last, to know a retry of it by. The body is kept as a hash."""

    request_id: str
    url: str
    body_hash: int
    retry_count: int


_last_attempt: ContextVar[_Attempt | None] = ContextVar("sloscope_last_attempt", default=None)


def _checked(labels: dict[str, Any]) -> dict[str, Any]:
    """Raises ConfigError for what would fail with each request."""
    try:
        is_kept = orjson.loads(orjson.dumps(labels)) == labels  # a NaN is not
    except (TypeError, ValueError):
        is_kept = False
    if not (is_kept and records.labels_fit(labels) and all(type(each) in _LABEL_TYPES for each in labels.values())):
        raise ConfigError(
            f"labels: accepted: at most {records.MAX_LABELS}, names and texts of at most {records.MAX_LABEL_TEXT} "
            "characters, numbers of 64 bits, booleans"
        )
    return labels


class _Observer:
    """What the sync and the async transport share."""

    def __init__(
        self,
        events: str | Path | None,
        contract: Contract | str | Path | None,
        tenant: str | None,
        labels: Mapping[str, str | int | float | bool] | None,
        on_end: Callable[[RequestRecorder], None] | None,
        receipts: str | None,
        receipts_token: str | None,
    ) -> None:
        if events is None and on_end is None and receipts is None:
            raise ConfigError("events: accepted: a directory; or None beside on_end or receipts")
        if receipts_token and receipts is None:
            raise ConfigError("receipts_token: accepted: beside receipts, whose token it is")
        self.posting = _posting(receipts, receipts_token or "") if receipts is not None else None
        self._contract = contracts.load(contract) if isinstance(contract, (str, Path)) else contract
        self._contract_hash = self._contract.hash if self._contract is not None else None
        self._tenant = tenant
        self._labels = _checked(dict(labels or {}))
        self._on_end = on_end
        self.log = ReceiptLog(None if events is None else Path(events), on_end=self._tell)
        self.probes = LoopProbes(lambda: self.log.open_requests > 0)
        self._known_ids: OrderedDict[str, None] = OrderedDict()
        # request id → a request that a redirect has answered, when and with which status; its client may follow or not.
        self._redirected: OrderedDict[str, tuple[RequestRecorder, int, int]] = OrderedDict()
        self.errors = 0
        self.last_error = ""

    def guard(self, act: Callable[[], Any]) -> Any:
        """The result, or None after an error of ours, which is counted and goes no further."""
        try:
            return act()
        except Exception as error:
            self.errors += 1
            self.last_error = f"{type(error).__name__}: {error}"
            return None

    def _tell(self, recorder: RequestRecorder) -> None:
        on_end, posting = self._on_end, self.posting
        if posting is not None:
            self.guard(lambda: posting.add(recorder, self.log))
        if on_end is not None:
            self.guard(lambda: on_end(recorder))

    def begin(self, request: Any, in_loop: bool = False) -> RequestRecorder | None:
        """None: this is no request for completions, or the observer failed."""
        if request.method != "POST" or not request.url.path.rstrip("/").endswith("/completions"):
            return None
        send_ns = time.monotonic_ns()
        if self.posting is not None:
            self.guard(self.posting.start)
        recorder: RequestRecorder | None = self.guard(lambda: self._begin(request, send_ns, in_loop))
        return recorder

    def _begin(self, request: Any, send_ns: int, in_loop: bool) -> RequestRecorder:
        headers = request.headers
        moved = self._redirected.pop(headers.get(ID_HEADER, ""), None)
        self._end_redirected(send_ns - _FOLLOWED_WITHIN_NS)
        if moved is not None:
            # The same request on its way to another address.
            return moved[0]
        content = _content(request)
        # Whether a request that could not be read streams is unknown, not false.
        read = content is not None
        body = _json_object(content or b"")
        labels = dict(self._labels)
        count = _whole(headers.get(_RETRY_COUNT)) or 0
        if count:
            labels["retry_count"] = count
        request_id, retry_of = self._identity(request, content, count)
        headers[ID_HEADER] = request_id
        if retry_of is not None:
            headers[RETRY_HEADER] = retry_of
        _ask_for_what_we_can_read(headers)
        self.log.start_thread()
        probe: LagProbe | None = self.probes.here() if in_loop else None
        return self.log.open(
            request_id,
            send_ns,
            lag_since=None if probe is None else probe.since,
            streaming=body.get("stream") is True if read else None,
            n_choices=min(_positive(body.get("n")) or 1, MAX_CHOICES) if read else None,
            resolved=self._resolve(headers),
            model=body["model"][:256] if isinstance(body.get("model"), str) else None,
            tenant=_short(headers.get("x-slo-tenant") or self._tenant),
            external_id=_short(headers.get("x-request-id")),
            retry_of=retry_of,
            contract_hash=self._contract_hash,
            max_tokens=_positive(body.get("max_completion_tokens")) or _positive(body.get("max_tokens")),
            path=_short(request.url.path),
            labels=labels or None,
        )

    def _identity(self, request: Any, content: bytes | None, count: int) -> tuple[str, str | None]:
        """(request id, the request that this one retries)."""
        headers, url, body_hash = request.headers, str(request.url), hash(content)
        before, retry_of = _last_attempt.get(), headers.get(RETRY_HEADER)
        if (
            count
            and before is not None
            and (before.url, before.body_hash, before.retry_count) == (url, body_hash, count - 1)
        ):
            retry_of = before.request_id
        own = headers.get(ID_HEADER, "")
        if own in self._known_ids and not count:
            # The same httpx.Request once more, of an auth flow or of a transport around ours that retries.
            retry_of = own
        # The openai package repeats the caller's headers on a retry; an id names one request only.
        request_id = own if is_request_id(own) and not count and own != retry_of else new_request_id()
        self._known_ids[request_id] = None
        while len(self._known_ids) > _MAX_KNOWN_IDS:
            self._known_ids.popitem(last=False)
        _last_attempt.set(_Attempt(request_id, url, body_hash, count))
        return request_id, retry_of if retry_of is not None and is_request_id(retry_of) else None

    def _resolve(self, headers: Any) -> Resolved | None:
        class_name = headers.get(contracts.CLASS_HEADER, "")
        try:
            if self._contract is not None:
                return contracts.resolve(self._contract, headers)
            own = contracts.own_limits(headers)
        except ContractError as error:
            # A limit that does not parse must not stop the call; the server will say what it thinks of it.
            self.errors += 1
            self.last_error = f"{type(error).__name__}: {error}"
            if self._contract is not None:
                return contracts.resolve(self._contract, {contracts.CLASS_HEADER: class_name})
            own = {}
        if not class_name and not own:
            return None
        return Resolved(class_name[:256], Limits().overridden(own), own, known=True)

    def failed(self, recorder: RequestRecorder, error: BaseException) -> None:
        """The call, or a pull, raised."""
        end_ns = time.monotonic_ns()
        transport, left = _why(error)
        self.guard(lambda: recorder.end(end_ns, transport, left, type(error).__name__))

    def responded(self, recorder: RequestRecorder, response: Any, stream_class: Callable[[str], type[Any]]) -> None:
        """The head has come: from here on the body passes through us."""

        def watch() -> None:
            if response.status_code in _SENT_AGAIN_BY_REDIRECT and "location" in response.headers:
                # What it is answered with comes from elsewhere, if its client goes there.
                self._redirected[recorder.request_id] = recorder, time.monotonic_ns(), response.status_code
                return
            recorder.response(response.status_code, response.headers)
            response.stream = stream_class(_library(response))(self, recorder, response.stream)

        self.guard(watch)

    def _end_redirected(self, before_ns: int) -> None:
        """Ends the requests whose redirect came before this stamp and was not followed."""
        while self._redirected:
            request_id, (recorder, at_ns, status) = next(iter(self._redirected.items()))
            if at_ns >= before_ns:
                return
            if self._redirected.pop(request_id, None) is not None:
                recorder.response(status, {})
                recorder.end(at_ns)

    def leave(self) -> None:
        """The client is closing: its open streams were left."""
        end_ns, left = time.monotonic_ns(), _stop_reason.get() or "disconnect"
        self.guard(lambda: self._end_redirected(end_ns + 1))
        self.guard(lambda: self.log.end_open(end_ns, left))

    def close(self) -> None:
        self.guard(self.log.close)
        if self.posting is not None:
            self.guard(self.posting.close)

    async def aclose(self) -> None:
        self.guard(self.log.close)
        if self.posting is not None:
            from anyio import CancelScope, to_thread  # of httpx's own needs

            # What other tasks read must not wait for a control plane.
            with CancelScope(shield=True):
                await to_thread.run_sync(self.guard, self.posting.close)


def _posting(url: str, token: str) -> ReceiptPosting:
    """Raises ConfigError."""
    # httptools is needed by who posts alone.
    from sloscope.client.receipt_posting import ReceiptPosting

    return ReceiptPosting(url, token)


class _Recording:
    """Half of a transport: what is the same in a sync and an async one."""

    _default_inner: Callable[[], Any]

    def __init__(
        self,
        events: str | Path | None = None,
        contract: Contract | str | Path | None = None,
        inner: Any = None,
        *,
        tenant: str | None = None,
        labels: Mapping[str, str | int | float | bool] | None = None,
        on_end: Callable[[RequestRecorder], None] | None = None,
        receipts: str | None = None,
        receipts_token: str | None = None,
    ) -> None:
        self._observer = _Observer(events, contract, tenant, labels, on_end, receipts, receipts_token)
        self._inner = inner if inner is not None else self._default_inner()

    @property
    def observer_errors(self) -> int:
        """Errors of the observer, and records that could not be written."""
        return self._observer.errors + self._observer.log.lost

    @property
    def receipts_failed(self) -> int:
        """Requests whose receipts did not reach the control plane."""
        return 0 if self._observer.posting is None else self._observer.posting.failed

    @property
    def last_error(self) -> str:
        posting = self._observer.posting
        own = self._observer.last_error or self._observer.log.last_error
        return own or ("" if posting is None else posting.last_error)


class ReceiptTransport(_Recording, httpx.BaseTransport):
    """Records every POST to …/completions that passes through. Bodies pass unchanged; a request gets its id (and that
    of the request it retries) as headers, and Accept-Encoding keeps only what can be read here (gzip, deflate).

    `events`: directory of the records; None with `on_end` or `receipts` alone. `contract`: a Contract, a TOML file, or
    None, when requests carry no limits. `inner`: the transport that does the work, by default httpx.HTTPTransport().
    `on_end` is called with the RequestRecorder of each request that ended, in the thread that ended it. `receipts`: the
    control address of a sidecar, to which they are posted once a second, `receipts_token` its bearer token.

    Raises JournalError, ContractError or ConfigError here, before anything is sent, and nothing of its own afterwards.
    """

    _default_inner = httpx.HTTPTransport

    def handle_request(self, request: Any) -> Any:
        recorder = self._observer.begin(request)
        if recorder is None:
            return self._inner.handle_request(request)
        try:
            response = self._inner.handle_request(request)
        except BaseException as error:
            self._observer.failed(recorder, error)
            raise
        self._observer.responded(recorder, response, _sync_class)
        return response

    def close(self) -> None:
        # First, so that what the close does to a stream is not taken for the server's doing.
        self._observer.leave()
        try:
            self._inner.close()
        finally:
            self._observer.close()


class AsyncReceiptTransport(_Recording, httpx.AsyncBaseTransport):
    """ReceiptTransport for async clients; `inner` is by default httpx.AsyncHTTPTransport()."""

    _default_inner = httpx.AsyncHTTPTransport

    async def handle_async_request(self, request: Any) -> Any:
        recorder = self._observer.begin(request, in_loop=True)
        if recorder is None:
            return await self._inner.handle_async_request(request)
        try:
            response = await self._inner.handle_async_request(request)
        except BaseException as error:
            self._observer.failed(recorder, error)
            raise
        self._observer.responded(recorder, response, _async_class)
        return response

    async def aclose(self) -> None:
        self._observer.leave()
        try:
            await self._inner.aclose()
        finally:
            await self._observer.aclose()


class _Watched:
    """A response body on its way to the consumer."""

    def __init__(self, observer: _Observer, recorder: RequestRecorder, inner: Any) -> None:
        self._observer = observer
        self._recorder = recorder
        self._inner = inner
        self._response_ns = time.monotonic_ns()

    def _received(self, data: bytes) -> int:
        """Records what a pull brought; the stamp from which the consumer holds it."""
        t_ns = time.monotonic_ns()
        self._observer.guard(lambda: self._recorder.receive(t_ns, data))
        return time.monotonic_ns()

    def _held(self, since_ns: int) -> None:
        recorder = self._recorder
        recorder.consumer_hold_ns = (recorder.consumer_hold_ns or 0) + time.monotonic_ns() - since_ns

    def _over(self) -> None:
        end_ns = time.monotonic_ns()
        self._observer.guard(lambda: self._recorder.end(end_ns))

    def _left(self) -> None:
        end_ns, left = time.monotonic_ns(), _stop_reason.get() or "disconnect"
        self._observer.guard(lambda: self._recorder.end(end_ns, left=left))

    def __del__(self) -> None:
        # A consumer that just drops its response. No lock may be taken in a finaliser.
        self._recorder.abandon(time.monotonic_ns())


class _SyncWatched(_Watched):
    def __iter__(self) -> Iterator[bytes]:
        self._held(self._response_ns)
        try:
            for data in self._inner:
                held_since_ns = self._received(data)
                yield data
                self._held(held_since_ns)
        except GeneratorExit:
            # The consumer stopped pulling; `close` or `__del__` records how it left.
            raise
        except BaseException as error:
            self._observer.failed(self._recorder, error)
            raise
        self._over()

    def close(self) -> None:
        try:
            self._inner.close()
        finally:
            self._left()


class _AsyncWatched(_Watched):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        self._held(self._response_ns)
        try:
            async for data in self._inner:
                held_since_ns = self._received(data)
                yield data
                self._held(held_since_ns)
        except GeneratorExit:
            raise
        except BaseException as error:
            self._observer.failed(self._recorder, error)
            raise
        self._over()

    async def aclose(self) -> None:
        try:
            await self._inner.aclose()
        finally:
            self._left()


def _library(response: Any) -> str:
    """`httpx` or `httpx2`: each insists that a stream is an instance of its own base class."""
    modules = [cls.__module__.partition(".")[0] for cls in type(response).__mro__]
    return next((name for name in modules if name in ("httpx", "httpx2")), "httpx")


@cache
def _sync_class(library: str) -> type[Any]:
    return type("ReceiptStream", (_SyncWatched, importlib.import_module(library).SyncByteStream), {})


@cache
def _async_class(library: str) -> type[Any]:
    return type("AsyncReceiptStream", (_AsyncWatched, importlib.import_module(library).AsyncByteStream), {})


def _why(error: BaseException) -> tuple[str, str]:
    """(transport, left) as in definitions.StreamEnd. By class name, since httpx and httpx2 have the same names."""
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & {"ConnectError", "ConnectTimeout", "UnsupportedProtocol", "ProxyError"}:
        return "connect_error", ""
    if "TimeoutException" in names:
        return "eof", "client_timeout"
    # trio's cancellation is called Cancelled.
    if isinstance(error, (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt)) or "Cancelled" in names:
        return "eof", _stop_reason.get() or "disconnect"
    return "reset", ""


def _content(request: Any) -> bytes | None:
    try:
        content = request.content
    except Exception:
        # A body that is streamed up has not been read, and reading it is not ours to do.
        return None
    return content if isinstance(content, bytes) else None


def _json_object(content: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(content)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _ask_for_what_we_can_read(headers: Any) -> None:
    """Takes encodings that the standard library cannot undo (br, zstd) out of Accept-Encoding."""
    asked = [item.strip() for item in headers.get("accept-encoding", "").split(",") if item.strip()]
    readable = [item for item in asked if item.partition(";")[0].strip().lower() in _READABLE_ENCODINGS]
    if len(readable) < len(asked):
        headers["accept-encoding"] = ", ".join(readable) or "identity"


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 10 else None


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**63 else None


def _short(text: str | None) -> str | None:
    return text[:1024] if text else None
