"""One request and its response on their way through the sidecar.

The order for every piece of a response: stamped where the socket was read, stamped again and forwarded, and some time
later, with others, understood. What the observation raises stops here.

A request that may be hedged differs until its first output event: what comes is understood first and held, since only
one of two attempts may reach the client. From then on nothing is held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from exporter import ask_usage, http1
from exporter.ask_usage import UsageFilter
from exporter.attempt import Attempt
from exporter.contest import Contest
from exporter.framing import Chunked, MessageError, Sized, UntilClose
from exporter.http1 import RequestHead, ResponseHead
from exporter.observation import Observation
from exporter.relay import relay
from exporter.settings import Upstream, is_observed
from exporter.upstream import Pool, Work, estimate

if TYPE_CHECKING:
    from exporter.client_connection import ClientConnection
    from exporter.data_plane import DataPlane

_UPLOAD_BUFFER = 256 << 10  # bytes of a body that is not looked at, while the upstream is not connected yet
_MOST_GATHERED = 64 << 20  # bytes of all bodies that are to be read whole, or are kept to be sent once more
_LAST_CHUNK = b"0\r\n\r\n"
ID_HEADER = b"x-sloscope-request-id"


class Gathering:
    """Bodies under way that are to be read whole, and whole ones that are kept until they are answered. Together they
    are bounded. Where they would be more the largest of those that are kept is let go, since nothing is lost as long as
    its upstream answers; then the largest under way passes unread: a few clients that never finish must not keep the
    others from being read.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._sizes: dict[Exchange, int] = {}

    def add(self, exchange: Exchange, size: int) -> None:
        self._sizes[exchange] = self._sizes.get(exchange, 0) + size
        self.bytes += size
        while self.bytes > _MOST_GATHERED:
            giving = [each for each in self._sizes if each.may_give_way]
            if not giving:
                return  # all that is left is still to be sent
            max(giving, key=lambda each: (each.is_dispatched, self._sizes[each])).give_way()

    def drop(self, exchange: Exchange) -> None:
        self.bytes -= self._sizes.pop(exchange, 0)


class Exchange:
    """Lives from a complete request head to the end of the response, or until a side is gone."""

    def __init__(self, plane: DataPlane, client: ClientConnection, head: RequestHead, arrived_ns: int) -> None:
        self.plane = plane
        self._client = client
        self._head = head
        self.over = False
        self._observation: Observation | None = None
        self._id_header: http1.Headers = []
        if head.method == b"POST" and is_observed(head.path):
            self._watch(arrived_ns)
        else:
            plane.store.inc("sloscope_sidecar_passthrough_total")

        # The request on its way up. `_raw` is what was not sent, or what could be sent once more.
        limit = plane.settings.inspect_limit
        declared = head.body.left if isinstance(head.body, Sized) else 0
        self._gathering = self._observation is not None and declared <= limit
        self._declared = declared
        self._raw: list[bytes] = []
        self._raw_bytes = 0
        self._payload: list[bytes] = []
        self._own_headers: http1.Headers = []  # in place of the client's
        self._asks_usage = False
        self.is_dispatched = False
        self.is_kept = True  # could be sent once more

        # Who answers. While that is not decided there is no leader, and what the attempts bring is held.
        self._leader: Attempt | None = None
        self._contest: Contest | None = None
        self.tried: list[Pool] = []  # could not be reached
        self._whole_ns = 0  # when the request was complete
        self._awaits_output = False  # a first attempt whose first output event is to be timed

        # The response on its way down.
        self._dechunk = False
        self._filter: UsageFilter | None = None
        self._held_since_ns = 0

        if head.expects_continue and not head.body.complete:
            client.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if head.body.complete:
            self._request_complete(arrived_ns)
        elif not self._gathering:
            # In the next turn: a body that is broken in the very read that brought its head sends nothing up.
            plane.loop.call_soon(self._dispatch_unread)

    # --- observing

    def _watch(self, arrived_ns: int) -> None:
        try:
            path = self._head.path.decode("latin-1")
            self._observation = Observation(self.plane.watch, self._head.lowered(), path, arrived_ns)
            self._id_header = [(ID_HEADER, self._observation.request_id.encode())]
        except Exception as error:
            self.plane.observer_failed(error)

    def observe(self, method: Callable[..., None], *arguments: Any) -> bool:
        """The one boundary: what the observer raises is counted, and the stream goes on."""
        try:
            method(*arguments)
        except Exception as error:
            self.plane.observer_failed(error)
            return False
        return True

    def _end_observation(self, transport: str, left: str = "") -> None:
        """The request is over, and with it every attempt."""
        if self._observation is None:
            return
        if self._held_since_ns:
            self.download_resumed()
        leader, contest = self._leader, self._contest
        if leader is None and contest is not None:
            leader = contest.abandon(transport, left)
        complete = leader is not None and leader.body is not None and leader.body.complete
        now = self.plane.clock.monotonic_ns()
        self.observe(self._observation.ended, transport, left, complete, now)
        if contest is not None and contest.prompts_lost and self.plane.hedges is not None:
            told = self._observation.prompt_tokens
            prompt = self.estimate().prompt if told is None else told
            self.plane.hedges.wasted(contest.prompts_lost * prompt)

    # --- the request: from the client to the upstream

    @property
    def is_observed(self) -> bool:
        return self._observation is not None

    @property
    def request_complete(self) -> bool:
        return self._head.body.complete

    @property
    def method(self) -> bytes:
        return self._head.method

    def request_data(self, data: bytes, now: int) -> int:
        """Takes body bytes from the client; how many of them were the body's. Raises MessageError."""
        payload, used = self._head.body.feed(data)
        raw = data if used == len(data) else data[:used]
        leader = self._leader
        if self._gathering:
            self._raw.append(raw)
            self._payload.append(payload)
            self._raw_bytes += used
            if not self._head.body.complete:
                if self._raw_bytes > self.plane.settings.inspect_limit:
                    self.pass_unread()
                else:
                    copied = len(payload) if isinstance(self._head.body, Chunked) else 0
                    self.plane.gathering.add(self, used + copied)
        elif leader is not None and leader.sent and leader.connection is not None:
            leader.connection.upload(raw)
        else:
            self._raw.append(raw)
            self._raw_bytes += used
            if self._raw_bytes > _UPLOAD_BUFFER:
                self._client.pause_reading()
        if self._head.body.complete:
            self._client.resume_reading()
            self._request_complete(now)
        return used

    @property
    def may_give_way(self) -> bool:
        return not self.is_dispatched or all(attempt.sent for attempt in self._attempts)

    def give_way(self) -> None:
        if self.is_dispatched:
            self._forget()
        else:
            self.pass_unread()

    def _forget(self) -> None:
        """The request is not sent once more."""
        self._raw = []
        self.is_kept = False
        self.plane.gathering.drop(self)

    def pass_unread(self) -> None:
        """Too large to look at: from here on it streams."""
        self._gathering = False
        self._payload = []
        self._dispatch(None, None)

    def _request_complete(self, now: int) -> None:
        self._whole_ns = now
        if not self.is_dispatched:
            body = b"".join(self._payload)
            self._payload = []
            self._dispatch(body if self._gathering else None, now)

    def _dispatch_unread(self) -> None:
        if not self.over and not self.is_dispatched:
            self._dispatch(None, None)

    def _dispatch(self, body: bytes | None, body_complete_ns: int | None) -> None:
        """Begins the record and looks for a connection, both at once; the request is sent when both are there."""
        self.is_dispatched = True
        self.plane.gathering.drop(self)
        asked = self._read(body)
        pool = self.plane.upstreams.choose()
        assert pool is not None
        first = Attempt(self, 0, pool, self.estimate(asked))
        if body is not None and self.plane.settings.ask_usage:
            self._ask_usage(body, asked)
        if not self._hold(asked, first):
            self._leader = first
        if self._observation is None:
            first.begin_written = True
        else:
            url = first.pool.upstream.url
            if not self.observe(self._observation.begin, body, body_complete_ns, url, first.on_begin_written):
                first.begin_written = True
        first.acquire()

    def _read(self, body: bytes | None) -> Mapping[str, Any]:
        if self._observation is not None:
            try:
                return self._observation.read_request(body)
            except Exception as error:
                self.plane.observer_failed(error)
        return {}

    def estimate(self, asked: Mapping[str, Any] | None = None) -> Work:
        """What the request asks of an upstream."""
        if self._observation is not None and asked is None:
            asked = self._read(None)
        return estimate(asked if self._observation is not None else None, max(self._raw_bytes, self._declared))

    def _ask_usage(self, body: bytes, asked: Mapping[str, Any]) -> None:
        changed = ask_usage.asking(body, asked, self._head.lowered())
        if changed is None:
            return
        if isinstance(self._head.body, Chunked):
            if not b"".join(self._raw).endswith(b"\r\n" + _LAST_CHUNK):
                return  # with trailers, which may speak of the body as it was
            self._raw = [b"%x\r\n%b\r\n" % (len(changed), changed), _LAST_CHUNK]
        else:
            self._raw = [changed]
            self._own_headers = [(b"content-length", b"%d" % len(changed))]
        self._asks_usage = True

    def request_for(self, upstream: Upstream) -> bytes:
        head = http1.encode_request(
            self._head, upstream.prefix, upstream.authority, [*self._id_header, *self._own_headers]
        )
        return b"".join((head, *self._raw))

    def request_sent(self) -> None:
        if not self._head.body.complete:
            self._forget()  # as it is streamed
            self._client.resume_reading()
        elif self._raw_bytes:
            self.plane.gathering.drop(self)  # a second attempt sends the same
            self.plane.gathering.add(self, self._raw_bytes)

    def next_upstream(self, failed: Pool) -> Pool | None:
        """For an attempt that could not reach its own."""
        self.tried.append(failed)
        return self.plane.upstreams.choose([*self.tried, *(each.pool for each in self._attempts)])

    def attempt_moved(self, attempt: Attempt) -> None:
        """Its upstream could not be reached, and it goes to another one."""
        if self._observation is not None:
            self._observation.went_to[attempt.number] = attempt.pool.upstream.url

    @property
    def _attempts(self) -> list[Attempt]:
        if self._leader is not None:
            return [self._leader]
        return self._contest.attempts if self._contest is not None else []

    def upload_paused(self) -> None:
        if not self._head.body.complete:
            self._client.pause_reading()

    def upload_resumed(self) -> None:
        self._client.resume_reading()

    # --- who answers

    def _hold(self, asked: Mapping[str, Any], first: Attempt) -> bool:
        """Whether it is not decided yet who answers: a stream of an observed path, kept whole so that it can be sent a
        second time.
        """
        hedges, observation = self.plane.hedges, self._observation
        if hedges is None or observation is None or not self._gathering or asked.get("stream") is not True:
            return False
        hedges.offered()
        self._awaits_output = True
        contest = Contest(self, hedges, observation, first, self._whole_ns)
        if contest.begin():
            self._contest = contest
        return self._contest is not None

    def lead(self, attempt: Attempt, received_ns: int) -> None:
        """This attempt answers; the last of what it brought up to now came at `received_ns`."""
        assert self._leader is None
        self._leader = attempt
        if attempt.response is not None:
            self._release(attempt, received_ns)

    # --- the response: from the upstream to the client

    def informed(self, attempt: Attempt, response: ResponseHead) -> None:
        """1xx. Nothing of an attempt that may lose reaches the client."""
        if self._leader is attempt and self._head.version == "1.1":
            self._client.transport.write(http1.encode_response(response, [], chunked=False, close=False))

    def response_started(self, attempt: Attempt, rest: bytes, now: int) -> None:
        if self._leader is None:
            assert self._contest is not None and attempt.response is not None
            self._contest.response_started(attempt, _said(attempt.response), rest, now)
            return
        self.body_received(attempt, rest, now, self._encode_head(attempt))

    def _understand_head(self, response: ResponseHead | None, is_new: bool) -> None:
        """Of the response that was just handed on. `is_new`: what it says of its body is not known from a contest."""
        if self._observation is None or response is None:
            return
        if is_new:
            self.observe(self._observation.response_started, *_said(response))
        if told := response.get_all(b"server-timing"):
            self.observe(self._observation.timed, ", ".join(told))

    def _encode_head(self, attempt: Attempt) -> bytes:
        response = attempt.response
        assert response is not None
        self._forget()
        is_chunked = isinstance(response.body, Chunked)
        if self._asks_usage and _is_plain_stream(response):
            self._filter = UsageFilter()
            if isinstance(response.body, Sized):
                # How long it will be is known at its end.
                is_chunked = True
                headers = [pair for pair in response.headers if pair[0].lower() != b"content-length"]
                response = response._replace(headers=headers)
        # HTTP/1.0 has no chunks: its client gets the payload until the connection ends.
        self._dechunk = is_chunked and self._head.version == "1.0"
        endless = self._dechunk or isinstance(response.body, UntilClose)
        self._client.must_close |= endless or not self._head.keep_alive or not self.request_complete
        head = http1.encode_response(
            response, self._id_header, is_chunked and not self._dechunk, self._client.closes_next
        )
        if self._client.is_held:
            self.download_paused()
        return head

    def body_received(self, attempt: Attempt, data: bytes, now: int, head: bytes = b"") -> None:
        """`head`: of the response, to go out with it."""
        if self._leader is not attempt:
            assert self._contest is not None
            self._contest.body_received(attempt, data, now)
            return
        body = attempt.body
        assert body is not None
        is_broken = False
        try:
            payload, used = body.feed(data)
        except MessageError as error:
            payload, used, is_broken = error.payload, error.used, True  # what came before it is as good as ever
        if self._filter is None:
            out = payload if self._dechunk else data if used == len(data) else data[:used]
        else:
            out = self._filtered(payload, body.complete)
        # Before the write: on another core the client can have the bytes before the call returns.
        forwarded_ns = self.plane.clock.monotonic_ns()
        self._client.transport.write(head + out if head else out)
        done_ns = self.plane.clock.monotonic_ns()
        if head:
            self._understand_head(attempt.response, is_new=True)
        if self._observation is not None and payload:
            self.observe(self._observation.forwarded, payload, now, forwarded_ns, done_ns)
            if self._observation.is_far_behind and attempt.connection is not None:
                self._observation.on_caught_up = self._observer_caught_up
                attempt.connection.pause_reading("observer")
            if self._awaits_output:
                self._time_output(attempt, now)
        if is_broken:
            self._break_off("eof")
        elif body.complete:
            if not self.over:
                self._response_complete(clean=used == len(data))
        elif head:
            self._shorten(attempt)

    def _observer_caught_up(self) -> None:
        if self._leader is not None and self._leader.connection is not None:
            self._leader.connection.resume_reading("observer")

    def _shorten(self, attempt: Attempt) -> None:
        """From here on nothing is done to the body but forward it: its reads may take the short way."""
        body, observation = attempt.body, self._observation
        is_plain = self._filter is None and not self._dechunk and not self._awaits_output
        connection = attempt.connection
        if isinstance(body, Chunked) and observation is not None and connection is not None and is_plain:
            write, now = self._client.transport.write, self.plane.clock.monotonic_ns
            connection.receive_by(relay(body, write, observation, now, attempt.receive))

    def _time_output(self, attempt: Attempt, now: int) -> None:
        assert self._observation is not None and self.plane.hedges is not None
        self.observe(self._observation.understand)
        if self._observation.events:
            self._awaits_output = False
            if attempt.number == 0:
                self.plane.hedges.took(now - self._whole_ns, now)
            self._shorten(attempt)

    def note_progress(self) -> None:
        """The upstream has less to do by what came."""
        if self._leader is not None and self._observation is not None:
            self._leader.progressed(self._observation.about_events)
            if self._observation.events:
                self._leader.answered(True)

    def _filtered(self, payload: bytes, complete: bool) -> bytes:
        """The payload without what the client did not ask for, in the framing that it was promised."""
        assert self._filter is not None
        if not complete:
            return self._framed(self._filter.feed(payload))
        out = self._framed(self._filter.feed(payload) + self._filter.finish())
        return out if self._is_endless else out + _LAST_CHUNK

    def _framed(self, out: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(out), out) if out and not self._is_endless else out

    @property
    def _is_endless(self) -> bool:
        """The client learns by the end of the connection that the response is over."""
        assert self._leader is not None
        return self._dechunk or isinstance(self._leader.body, UntilClose)

    def _release(self, attempt: Attempt, now: int) -> None:
        """What was held goes to the client, in one piece. `now`: when the last of it was received."""
        body, observation = attempt.body, self._observation
        assert body is not None and observation is not None
        head = self._encode_head(attempt)
        if self._filter is not None:
            out = self._filtered(b"".join(each.payload for each in attempt.held), body.complete)
        else:
            out = b"".join(each.payload if self._dechunk else each.raw for each in attempt.held)
        attempt.held = []
        forwarded_ns = self.plane.clock.monotonic_ns()
        self._client.transport.write(head + out)
        added_ns = self.plane.clock.monotonic_ns() - now
        self._understand_head(attempt.response, is_new=False)
        self.observe(observation.released, forwarded_ns, added_ns)
        if self._awaits_output:
            self._time_output(attempt, now)
        if body.complete and not self.over:
            self._response_complete(attempt.is_clean)

    def body_ended(self, attempt: Attempt) -> None:
        """The end of the connection was the end of the body."""
        if self._leader is None:
            self.body_received(attempt, b"", self.plane.clock.monotonic_ns())
            return
        if self._filter is not None:
            self._client.transport.write(self._filter.finish())
        self._response_complete(clean=False)

    def _response_complete(self, clean: bool) -> None:
        leader = self._leader
        assert leader is not None and leader.response is not None
        keep = clean and leader.response.keep_alive and self.request_complete
        self._end_observation("eof")
        leader.answered(True)
        self._close(keep_upstream=keep)
        self._client.exchange_over()

    def download_paused(self) -> None:
        """The client does not read: neither do we."""
        leader = self._leader
        if leader is None or leader.connection is None or self._held_since_ns:
            return
        self._held_since_ns = self.plane.clock.monotonic_ns()
        leader.connection.pause_reading("client")

    def download_resumed(self) -> None:
        if self._held_since_ns:
            held = self.plane.clock.monotonic_ns() - self._held_since_ns
            self._held_since_ns = 0
            if self._observation is not None:
                self._observation.consumer_hold_ns += held
            if self._leader is not None and self._leader.connection is not None:
                self._leader.connection.resume_reading("client")

    # --- ends

    def attempt_failed(self, attempt: Attempt, text: str, transport: str) -> None:
        """It has no answer, not even a bad one."""
        if transport != "connect_error":
            attempt.answered(False)
        if not self._is_made_good(attempt, transport):
            self._fail(502, text, transport)

    def attempt_broke_off(self, attempt: Attempt, transport: str) -> None:
        """Its answer ended where HTTP says it must not."""
        if self._leader is None:
            attempt.answered(False)  # whose first output event would have decided
        if not self._is_made_good(attempt, transport) and not self.over:
            self._break_off(transport)

    def _is_made_good(self, attempt: Attempt, transport: str) -> bool:
        """Whether another attempt answers now."""
        return self._leader is None and self._contest is not None and self._contest.failed(attempt, transport)

    def client_gone(self) -> None:
        """The client left. The upstream learns it in this very turn of the loop."""
        if not self.over:
            self._close(keep_upstream=False)
            self._end_observation("eof", left="disconnect")

    def refuse(self, error: MessageError) -> None:
        """The client's own body broke the protocol."""
        self._fail(error.status, str(error), "eof", left="disconnect")

    def cut(self) -> None:
        """The sidecar stops before the request ended: its own deadline, as seen from here."""
        if not self.over:
            self._end_observation("timeout")
            self._close(keep_upstream=False)
            self._client.abort()

    def _fail(self, status: int, text: str, transport: str, left: str = "") -> None:
        self._end_observation(transport, left)
        has_answer = self._leader is not None and self._leader.response is not None
        self._close(keep_upstream=False)
        if has_answer:
            self._client.abort()
        else:
            self._client.refuse(status, text, self._id_header, with_body=self._head.method != b"HEAD")

    def _break_off(self, transport: str) -> None:
        """The response stops short. Its client must be able to see that."""
        endless = self._is_endless
        if self._filter is not None:
            self._client.transport.write(self._framed(self._filter.finish()))
        self._end_observation(transport)
        if self._leader is not None:
            self._leader.answered(self._observation is not None and self._observation.about_events > 0)
        self._close(keep_upstream=False)
        if endless:
            # A close would look like the end of the body.
            self._client.reset()
        else:
            # What came so far goes out; the missing rest is seen by the framing.
            self._client.close()

    def _close(self, keep_upstream: bool) -> None:
        self.over = True
        self.plane.gathering.drop(self)
        for attempt in self._attempts:
            attempt.close(keep_upstream)


def _said(response: ResponseHead) -> tuple[int, str, str]:
    return response.status, response.get(b"content-type"), response.get(b"content-encoding")


def _is_plain_stream(response: ResponseHead) -> bool:
    kind = response.get(b"content-type").partition(";")[0].strip().lower()
    coding = response.get(b"content-encoding").strip().lower()
    return kind == "text/event-stream" and coding in ("", "identity")
