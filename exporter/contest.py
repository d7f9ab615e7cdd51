"""A request that may be hedged, until it is decided which attempt answers it. Nothing of it reaches its client before.

What comes is understood at once, other than in a stream that is forwarded, since the first output event decides.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from exporter.attempt import Attempt, Held
from exporter.framing import MessageError
from exporter.hedging import Hedges
from exporter.observation import Observation

if TYPE_CHECKING:
    from exporter.exchange import Exchange

_MOST_HELD = 64 << 10  # bytes of an attempt that has no output yet


class Contest:
    """One attempt at first, two once the wait is over. `exchange.lead` ends it."""

    def __init__(
        self, exchange: Exchange, hedges: Hedges, observation: Observation, first: Attempt, whole_ns: int
    ) -> None:
        self.prompts_lost = 0  # attempts that did not answer and had been sent
        self.attempts = [first]
        self._exchange = exchange
        self._hedges = hedges
        self._observation = observation
        self._whole_ns = whole_ns  # when the request was complete
        self._is_hedged = False
        self._is_decided = False
        self._timer: asyncio.TimerHandle | None = None
        self._now = exchange.plane.clock.monotonic_ns

    def begin(self) -> bool:
        """False: there is nothing to wait for, the first attempt answers."""
        wait_ns = self._hedges.wait_ns(self._whole_ns)
        if wait_ns is None:
            self._hedges.ended("no_threshold")
            return False
        if not self._understand(self.attempts[0]):
            self._hedges.ended("undecided")
            return False
        left_ns = max(0, wait_ns - (self._now() - self._whole_ns))
        self._timer = self._exchange.plane.loop.call_later(left_ns / 1e9, self._hedge)
        return True

    def _understand(self, attempt: Attempt) -> bool:
        try:
            attempt.stream = self._observation.new_stream()
        except Exception as error:
            self._exchange.plane.observer_failed(error)
            return False
        return True

    def _hedge(self) -> None:
        """No output event came in time."""
        self._timer = None
        (first,) = self.attempts
        if not self._exchange.is_kept:
            self._answer_with(first, "not_kept")
            return
        pool = self._exchange.plane.upstreams.choose_up([*self._exchange.tried, first.pool])
        if pool is None:
            self._answer_with(first, "no_upstream")
            return
        if not self._hedges.take():
            self._answer_with(first, "over_share")
            return
        self._is_hedged = True
        second = Attempt(self._exchange, 1, pool, self._exchange.estimate())
        self.attempts.append(second)
        begin, url = self._observation.begin_attempt, pool.upstream.url
        if self._understand(second) and self._exchange.observe(begin, 1, url, second.on_begin_written):
            second.acquire()
        else:
            self._answer_with(first, "undecided")

    # --- what the attempts bring

    def response_started(self, attempt: Attempt, said: tuple[int, str, str], rest: bytes, now: int) -> None:
        """`said`: status, content type and coding."""
        assert attempt.stream is not None
        is_understood = self._exchange.observe(attempt.stream.response, *said)
        self.body_received(attempt, rest, now, is_understood)

    def body_received(self, attempt: Attempt, data: bytes, now: int, is_understood: bool = True) -> None:
        body, stream, response = attempt.body, attempt.stream, attempt.response
        assert body is not None and stream is not None and response is not None
        is_broken = False
        try:
            payload, used = body.feed(data)
        except MessageError as error:
            payload, used, is_broken = error.payload, error.used, True
        attempt.held.append(Held(data[:used], payload))
        attempt.held_bytes += used
        attempt.is_clean = used == len(data)
        if payload and is_understood:
            is_understood = self._exchange.observe(stream.receive, now, payload)
        is_opaque = stream.opaque or not is_understood
        # Of a body that is one JSON object, what it says is not known before it is over.
        says_nothing = body.complete and stream.streamed and not (stream.type or stream.finish_reasons or is_opaque)
        if response.status >= 300 or says_nothing:
            # A failure, which the other attempt may still make good. Where that fails too, this one is the answer.
            attempt.failing = True
            other = self._other_than(attempt)
            if other is None or other.failing:
                self._answer_with(attempt, received_ns=now)
            elif attempt.held_bytes > _MOST_HELD:
                self._give_up(attempt, other, "eof")
        elif stream.type or is_opaque or body.complete or attempt.held_bytes > _MOST_HELD:
            self._answer_with(attempt, received_ns=now)
        if is_broken and not attempt.over:
            self._exchange.attempt_broke_off(attempt, "eof")

    def failed(self, attempt: Attempt, transport: str) -> bool:
        """Without output, and HTTP says so. True: it leaves it to the other one. False: it answers for the request."""
        other = self._other_than(attempt)
        if other is None:
            self._answer_with(attempt)
            return False
        self._give_up(attempt, other, transport)
        return True

    def _other_than(self, attempt: Attempt) -> Attempt | None:
        return next((each for each in self.attempts if each is not attempt), None)

    # --- the decision

    def _give_up(self, attempt: Attempt, other: Attempt, transport: str) -> None:
        self._end(attempt, transport, "")
        attempt.close()
        self.attempts = [other]
        self._answer_with(other)

    def _answer_with(self, leader: Attempt, result: str = "", received_ns: int = 0) -> None:
        """`received_ns`: when the last of what it brought came."""
        self._settle(result or (("lost", "won")[leader.number] if self._is_hedged else "not_needed"))
        now = self._now()
        other = self._other_than(leader)
        if other is not None:
            if other.number == 0:
                self._hedges.took(now - self._whole_ns, now)
            self._end(other, "eof", "voluntary")
            other.close()
            self.attempts = [leader]
        if leader.stream is not None:
            self._exchange.observe(self._observation.decided, leader.number, leader.stream)
        self._exchange.lead(leader, received_ns or now)

    def abandon(self, transport: str, left: str) -> Attempt:
        """The request ended before it was decided: it ends as its first attempt does, which is returned."""
        self._settle("undecided")
        leader, *others = self.attempts
        for other in others:
            self._end(other, transport, left)
        if leader.stream is not None:
            self._exchange.observe(self._observation.decided, leader.number, leader.stream)
        return leader

    def _settle(self, result: str) -> None:
        assert not self._is_decided
        self._is_decided = True
        self._hedges.ended(result)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self, attempt: Attempt, transport: str, left: str) -> None:
        self.prompts_lost += attempt.sent
        is_complete = attempt.body is not None and attempt.body.complete
        end = self._observation.end_attempt
        if attempt.stream is not None:
            self._exchange.observe(end, attempt.number, attempt.stream, transport, left, is_complete, self._now())
