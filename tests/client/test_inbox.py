"""What was read is stamped first and understood in its order; no test waits for a clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from sloscope.client import inbox
from sloscope.client.inbox import Inbox


class Told:
    """A reader that keeps what it is told, and takes a while over it on a clock of its own."""

    def __init__(self, clock: Clock, takes_ns: int = 0) -> None:
        self._clock, self._takes_ns = clock, takes_ns
        self.reads: list[tuple[int, bytes | None]] = []

    def understand(self, t_ns: int, data: bytes | None) -> None:
        self._clock.now += self._takes_ns
        self.reads.append((t_ns, data))


class Clock:
    def __init__(self) -> None:
        self.now = 0

    def monotonic_ns(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(inbox, "time", made)
    return made


def in_loop(test: Callable[[Inbox], None], turns: int = 1) -> None:
    async def main() -> None:
        test(Inbox())
        for _ in range(turns):
            await asyncio.sleep(0)

    asyncio.run(main())


def test_reads_are_understood_in_their_order_after_the_one_who_brought_them_is_done(clock: Clock) -> None:
    a, b = Told(clock), Told(clock)

    def bring(box: Inbox) -> None:
        box.put(a, 1, b"x")
        box.put(b, 2, b"y")
        box.put(a, 3, None)
        assert a.reads == b.reads == []

    in_loop(bring)
    assert (a.reads, b.reads) == ([(1, b"x"), (3, None)], [(2, b"y")])


def test_between_two_slices_the_loop_looks_at_its_sockets(clock: Clock) -> None:
    reader = Told(clock, takes_ns=50_000)  # three fill a slice of 0.15 ms
    turns: list[int] = []

    async def main() -> None:
        box = Inbox()
        for number in range(8):
            box.put(reader, number, b"")
        while len(reader.reads) < 8:
            await asyncio.sleep(0)
            turns.append(len(reader.reads))

    asyncio.run(main())
    assert turns == [3, 6, 8]


def test_what_is_due_does_not_wait_for_the_reads_before_it(clock: Clock) -> None:
    reader = Told(clock, takes_ns=10_000)
    sent_at: list[int] = []

    def bring(box: Inbox) -> None:
        def send() -> None:
            box.due_ns = inbox.NEVER_NS
            sent_at.append(len(reader.reads))

        box.on_due = send
        box.due_ns = 50_000
        for _ in range(20):
            box.put(reader, clock.now, b"")

    in_loop(bring)
    assert sent_at == [5]  # 5 · 10 µs
    sent_at.clear()

    def bring_late(box: Inbox) -> None:
        box.on_due, box.due_ns = lambda: sent_at.append(len(reader.reads)), 1
        reader.reads.clear()
        box.put(reader, 2, b"")
        assert sent_at == [0]

    in_loop(bring_late)


def test_a_reader_whose_end_is_at_hand_catches_up_and_the_others_keep_their_place(clock: Clock) -> None:
    a, b = Told(clock), Told(clock)

    def bring(box: Inbox) -> None:
        for number in range(4):
            box.put((a, b)[number % 2], number, b"")
        box.catch_up(b)
        assert (a.reads, b.reads) == ([], [(1, b""), (3, b"")])
        box.catch_up()
        assert a.reads == [(0, b""), (2, b"")]

    in_loop(bring)
    assert (len(a.reads), len(b.reads)) == (2, 2)


def test_beyond_its_bound_the_oldest_is_understood_by_whoever_brings_more(clock: Clock) -> None:
    reader = Told(clock)

    def bring(box: Inbox) -> None:
        for number in range(20):
            box.put(reader, number, bytes(1 << 20))
        # 15 reads of 1 MiB and their book-keeping fit into 16 MiB.
        assert [t_ns for t_ns, _ in reader.reads] == [0, 1, 2, 3, 4]

    in_loop(bring)
    assert len(reader.reads) == 20


def test_a_reader_that_raises_does_not_keep_the_others_from_theirs(clock: Clock) -> None:
    class Broken:
        def understand(self, t_ns: int, data: bytes | None) -> None:
            raise RuntimeError("ours")

    reader, raised = Told(clock), []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context["exception"]))
        box = Inbox()
        box.put(Broken(), 0, b"")
        box.put(reader, 1, b"x")
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(main())
    assert reader.reads == [(1, b"x")] and [str(error) for error in raised] == ["ours"]
