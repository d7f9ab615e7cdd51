"""Posts what was recorded to a sidecar's control plane, so that its `client` series show real receipts.

The records themselves stand in this process's journal; a post says so (`recorded`) and is never written twice.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from typing import Any, Protocol

import orjson

from sloscope.client.h1 import Origin, Pool, Reply, fetch
from sloscope.client.recorder import RequestRecorder

POST_EVERY_S = 1.0
# Encoding a post must not hold the loop for longer than a millisecond or two.
_MOST_REQUESTS = 200
_MOST_EVENTS = 10_000
# Beyond either the control plane is not keeping up; the oldest are given up and counted.
_MOST_WAITING = 20_000  # requests
_MOST_WAITING_EVENTS = 1_000_000  # some 64 bytes of memory each


class _Planned(Protocol):
    @property
    def class_name(self) -> str: ...
    @property
    def tenant(self) -> str: ...


class _Target(Protocol):
    @property
    def model(self) -> str: ...


class ReceiptPoster:
    def __init__(
        self, control: Origin, target: _Target, clock_id: str, tls: ssl.SSLContext | None = None, token: str = ""
    ) -> None:
        """`token`: the bearer token that the control plane asks for; "": none."""
        self._headers = {"content-type": "application/json"}
        if token:
            self._headers["authorization"] = f"Bearer {token}"
        self._pool = Pool(control, tls)
        self._model = target.model
        self._clock_id = clock_id
        self._waiting: deque[dict[str, Any]] = deque()
        self._events = 0  # of those
        self.failed = 0  # requests whose receipts did not arrive
        self.last_error = ""

    def add(self, recorder: RequestRecorder, planned: _Planned) -> None:
        entry = receipt(recorder, self._clock_id, class_=planned.class_name, model=self._model, tenant=planned.tenant)
        self._waiting.append(entry)
        self._events += len(entry["t_ns"])
        while len(self._waiting) > _MOST_WAITING or (self._events > _MOST_WAITING_EVENTS and len(self._waiting) > 1):
            self._events -= len(self._waiting.popleft()["t_ns"])
            self.failed += 1

    async def run(self) -> None:
        while True:
            await asyncio.sleep(POST_EVERY_S)
            await self._post_waiting()

    async def close(self) -> int:
        """Posts the rest, unless the control plane does not answer; the requests whose receipts did not arrive."""
        await self._post_waiting()
        self.failed += len(self._waiting)
        self._waiting.clear()
        self._events = 0
        await self._pool.close()
        return self.failed

    def _take_batch(self) -> list[dict[str, Any]]:
        batch: list[dict[str, Any]] = []
        events = 0
        while self._waiting and len(batch) < _MOST_REQUESTS:
            events += len(self._waiting[0]["t_ns"])
            if batch and events > _MOST_EVENTS:
                break
            batch.append(self._waiting.popleft())
            self._events -= len(batch[-1]["t_ns"])
        return batch

    def _give_back(self, batch: list[dict[str, Any]]) -> None:
        self._waiting.extendleft(reversed(batch))
        self._events += sum(len(entry["t_ns"]) for entry in batch)

    async def _post_waiting(self) -> None:
        """Stops at a control plane that does not answer or has had enough; what still waits is tried a second later."""
        while self._waiting:
            batch = self._take_batch()
            try:
                reply = await fetch(
                    self._pool,
                    "POST",
                    "/v1/receipts",
                    self._headers,
                    orjson.dumps({"receipts": batch}),
                    timeout_s=5.0,
                )
            except (OSError, TimeoutError) as error:
                self.failed += len(batch)
                self.last_error = str(error) or type(error).__name__
                return
            if reply.status == 429:
                self._give_back(batch)
                self.last_error = "status 429"
                return
            self._count_refused(reply, len(batch))

    def _count_refused(self, reply: Reply, sent: int) -> None:
        """The control plane takes receipts one by one and says which it refused and why."""
        try:
            answer = orjson.loads(reply.body)
            refused = answer["rejected"]
            self.failed += len(refused)
            if refused:
                self.last_error = str(refused[0]["error"])
        except (ValueError, KeyError, IndexError, TypeError):
            if reply.status >= 300:
                self.failed += sent
                self.last_error = f"status {reply.status}"


def receipt(recorder: RequestRecorder, clock_id: str, *, class_: str, model: str, tenant: str) -> dict[str, Any]:
    """One entry of `POST /v1/receipts`. Fields that are not known are left out."""
    assert recorder.ended is not None
    entry = {
        "request_id": recorder.request_id,
        "clock_id": clock_id,
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
        "output_tokens": recorder.output_tokens,
        "token_source": recorder.token_source,
        "class": class_,
        "model": model,
        "tenant": tenant or None,
        "streaming": recorder.streaming,
        "n_choices": recorder.n_choices,
        "loop_lag_max_ns": recorder.loop_lag_max_ns,
        "consumer_hold_ns": recorder.consumer_hold_ns,
        "http_status": recorder.http_status,
        "recorded": True,
    }
    return {name: value for name, value in entry.items() if value is not None}
