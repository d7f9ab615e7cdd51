"""Posts what was recorded to a sidecar's control plane, so that its `client` series show real receipts.

The records themselves stand in this process's journal, whose name a post tells: where that directory is the sidecar's,
they are counted there and not written again.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections import deque
from typing import Any

import orjson

from sloscope.client.h1 import Origin, Pool, Reply, fetch, why
from sloscope.client.receipt_log import ReceiptLog
from sloscope.client.recorder import RequestRecorder
from sloscope.errors import ConfigError
from sloscope.records import MAX_NAME, MAX_TOKENS

POST_EVERY_S = 1.0
_PATH = "/v1/receipts"
_FRAME = b'{"receipts":[%b]}'
_TIMEOUT_S = 5.0
# Who takes a post understands it in a millisecond or two.
_MOST_REQUESTS = 200
_MOST_BYTES = 256 << 10
# Beyond either the control plane is not keeping up; the oldest are given up and counted.
_MOST_WAITING = 20_000  # requests
_MOST_WAITING_BYTES = 64 << 20


class ReceiptPoster:
    """`add` may be called in any thread, also by a finaliser. The rest is asyncio: one loop at a time, from `start` to
    `close`.
    """

    def __init__(self, control: Origin, tls: ssl.SSLContext | None = None, token: str = "") -> None:
        """`token`: the bearer token that the control plane asks for; "": none."""
        self._control = control
        self._tls = tls
        self._headers = _headers(token)
        self._most_bytes = _MOST_BYTES  # of a post, as far as is known
        self.forget()

    def forget(self) -> None:
        """Nothing waits and nothing has failed, as in a forked child, whose parent posts what was there."""
        # A finaliser may run in a thread that holds it.
        self._lock = threading.RLock()
        self._waiting: deque[bytes] = deque()  # as JSON
        self._bytes = 0  # of those
        self.failed = 0  # requests whose receipts did not arrive
        self.last_error = ""

    def add(self, recorder: RequestRecorder, log: ReceiptLog) -> None:
        entry = orjson.dumps(receipt(recorder, log))
        with self._lock:
            self._waiting.append(entry)
            self._bytes += len(entry)
            while len(self._waiting) > _MOST_WAITING or (self._bytes > _MOST_WAITING_BYTES and len(self._waiting) > 1):
                self._bytes -= len(self._waiting.popleft())
                self._fail(1, "the control plane does not keep up")

    def start(self) -> None:
        self._stop = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run(self._stop))

    async def close(self, patience_s: float | None = None) -> None:
        """Posts the rest for so long (None: as long as the control plane takes it); what is left then has failed."""
        self._stop.set()
        await asyncio.wait({self._task}, timeout=patience_s)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        with self._lock:
            self._fail(len(self._waiting), self.last_error or "no time was left to post it")
            self._waiting.clear()
            self._bytes = 0

    async def _run(self, stop: asyncio.Event) -> None:
        pool = Pool(self._control, self._tls)
        try:
            is_last = False
            while not is_last:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), POST_EVERY_S)
                is_last = stop.is_set()  # before the post, which then has all that was added
                await self._post_waiting(pool)
        finally:
            await pool.close()

    def _take_batch(self) -> list[bytes]:
        batch: list[bytes] = []
        size = len(_FRAME % b"")
        with self._lock:
            while self._waiting and len(batch) < _MOST_REQUESTS:
                size += len(self._waiting[0]) + 1
                if batch and size > self._most_bytes:
                    break
                batch.append(self._waiting.popleft())
                self._bytes -= len(batch[-1])
        return batch

    def _give_back(self, batch: list[bytes]) -> None:
        with self._lock:
            self._waiting.extendleft(reversed(batch))
            self._bytes += sum(map(len, batch))

    def _fail(self, requests: int, said: str) -> None:
        with self._lock:
            if requests:
                self.failed += requests
                self.last_error = said

    async def _post_waiting(self, pool: Pool) -> None:
        """Stops at a control plane that does not answer or has had enough; what still waits is tried a second later."""
        while batch := self._take_batch():
            body = _FRAME % b",".join(batch)
            try:
                reply = await fetch(pool, "POST", _PATH, self._headers, body, _TIMEOUT_S)
            except (OSError, TimeoutError) as error:
                self._fail(len(batch), f"{self._control} cannot be reached: {why(error)}")
                return
            except asyncio.CancelledError:
                self._fail(len(batch), f"{self._control} did not answer in time")
                raise
            if reply.status == 429:
                self._give_back(batch)
                self.last_error = f"{self._control} answered 429"
                return
            if reply.status == 413 and len(batch) > 1:
                # How much it takes only it knows (--receipts-max-bytes), and one long receipt need not stop the others.
                self._most_bytes = len(body) // 2
                self._give_back(batch)
                continue
            self._count_refused(reply, len(batch))

    def _count_refused(self, reply: Reply, sent: int) -> None:
        """The control plane takes receipts one by one and says which it refused and why."""
        try:
            refused = orjson.loads(reply.body)["rejected"]
            if refused:
                self._fail(len(refused), str(refused[0]["error"]))
        except (ValueError, KeyError, IndexError, TypeError):
            if reply.status >= 300:
                self._fail(sent, f"{self._control} answered {reply.status}")


def _headers(token: str) -> dict[str, str]:
    headers = {"content-type": "application/json"}
    return headers | {"authorization": f"Bearer {token}"} if token else headers


async def probe_control(control: Origin, token: str = "", tls: ssl.SSLContext | None = None) -> None:
    """Posts no receipt at all, which a control plane refuses in its own words. Raises ConfigError for anything else."""
    pool = Pool(control, tls)
    try:
        reply = await fetch(pool, "POST", _PATH, _headers(token), _FRAME % b"")
    except (OSError, TimeoutError) as error:
        raise ConfigError(f"--receipts: {control} cannot be reached: {why(error)}") from None
    finally:
        await pool.close()
    said = _error_of(reply)
    # One that reports too much for now (429) is tried again later, as in the run.
    if reply.status in (200, 429) or (reply.status == 400 and said.startswith("body:")):
        return
    if reply.status == 401:
        raise ConfigError(
            f"--receipts: {control} answered 401; accepted: --token-file FILE, or SLOSCOPE_TOKEN, with its bearer token"
        )
    because = f" ({said[:200]})" if said else ""
    hint = ", not the one that forwards requests" if reply.status == 404 else ""
    if control.path.endswith(_PATH):
        hint = f", without {_PATH}"
    raise ConfigError(
        f"--receipts: {control} answered {reply.status}{because}; accepted: the control address of a sidecar{hint}"
    )


def _error_of(reply: Reply) -> str:
    """What a control plane says is wrong, on one line; "" for an answer that is none of its own."""
    try:
        error = orjson.loads(reply.body)["error"]
    except (ValueError, KeyError, IndexError, TypeError):
        return ""
    return " ".join(error.split()) if isinstance(error, str) else ""


def receipt(recorder: RequestRecorder, log: ReceiptLog) -> dict[str, Any]:
    """One entry of `POST /v1/receipts`. Fields that are not known are left out."""
    assert recorder.ended is not None
    begun, resolved, path = recorder.begun, recorder.resolved, log.path
    max_tokens = begun.get("max_tokens")
    entry = {
        "request_id": recorder.request_id,
        "clock_id": log.clock.clock_id,
        # For a sidecar on another host, which has no other way to place these stamps.
        "anchor": {"mono_ns": log.clock.monotonic_ns(), "wall_ns": log.clock.wall_ns()},
        "send_ns": recorder.send_ns,
        "intended_ns": recorder.intended_ns,
        "t_ns": recorder.t_ns.tolist(),
        "choice": recorder.choice.tolist(),
        "type": recorder.type.tolist(),
        "tokens": recorder.event_tokens,
        "outcome": recorder.ended.outcome,
        "reason": recorder.ended.reason,
        "finish_reason": recorder.finish_reasons or None,
        "end_ns": recorder.end_ns,
        "prompt_tokens": recorder.prompt_tokens,
        "output_tokens": recorder.output_tokens,
        "token_source": recorder.token_source,
        "class": (resolved.class_name or None) if resolved is not None else None,
        "own_limits": dict(resolved.own) or None if resolved is not None else None,
        # What is longer here than a control plane takes must not cost the whole receipt.
        **{name: (begun.get(name) or "")[:MAX_NAME] or None for name in ("model", "tenant", "external_id")},
        "retry_of": begun.get("retry_of"),
        "max_tokens": max_tokens if max_tokens is not None and max_tokens <= MAX_TOKENS else None,
        "labels": begun.get("labels"),
        "streaming": recorder.streamed if recorder.streaming is None else recorder.streaming,
        "n_choices": recorder.n_choices,
        "loop_lag_max_ns": recorder.loop_lag_max_ns,
        "consumer_hold_ns": recorder.consumer_hold_ns,
        "http_status": recorder.http_status,
        "recorded": True if path is not None else None,
        "journal": None if path is None else path.name,
    }
    return {name: value for name, value in entry.items() if value is not None}
