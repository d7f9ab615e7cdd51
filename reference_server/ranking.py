"""Who ranks first among many whose ranks change. Pure."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Any

from reference_server.request import Request, State

Rank = tuple[Any, ...]
_SLACK = 64  # outdated heap entries that are always tolerated


class Ranking:
    """The least rank of many names. A change costs a logarithm; a name leaves in constant time.

    The heap keeps outdated entries until they come up or outnumber the others, so it stays within twice what it ranks.
    """

    def __init__(self) -> None:
        self._ranks: dict[str, Rank] = {}
        self._heap: list[tuple[Rank, str]] = []

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, name: str) -> bool:
        return name in self._ranks

    def __iter__(self) -> Iterator[str]:
        """In order of rank. Sorts when the first is asked for: who only passes the iterator on pays nothing."""
        for _, name in sorted((rank, name) for name, rank in self._ranks.items()):
            yield name

    def rank(self, name: str) -> Rank:
        return self._ranks[name]

    def set(self, name: str, rank: Rank) -> None:
        if self._ranks.get(name) != rank:
            self._ranks[name] = rank
            heappush(self._heap, (rank, name))
            self._tidy()

    def discard(self, name: str) -> None:
        if self._ranks.pop(name, None) is not None:
            self._tidy()

    def first(self) -> str | None:
        while self._heap:
            rank, name = self._heap[0]
            if self._ranks.get(name) == rank:
                return name
            heappop(self._heap)
        return None

    def _tidy(self) -> None:
        if len(self._heap) > 2 * len(self._ranks) + _SLACK:
            self._heap = [(rank, name) for name, rank in self._ranks.items()]
            heapify(self._heap)

    def check_integrity(self) -> None:
        assert len(self._heap) <= 2 * len(self._ranks) + _SLACK, "the heap holds more than it ranks"
        entries = set(self._heap)
        assert all((rank, name) in entries for name, rank in self._ranks.items()), "a name cannot come up"


class Line:
    """Requests that wait: preempted ones first, the earliest arrival before the others, then the rest by rank."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._ranking = Ranking()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request.key in self._requests

    def __iter__(self) -> Iterator[Request]:
        for key in self._ranking:
            yield self._requests[key]

    def add(self, request: Request, *rank: int) -> None:
        assert request.key not in self._requests, f"request {request.key} waits already"
        again = request.state is State.PREEMPTED
        self._requests[request.key] = request
        self._ranking.set(request.key, (0, request.arrived_ns, *rank) if again else (1, *rank))

    def remove(self, request: Request) -> None:
        assert self._requests.get(request.key) is request, f"request {request.key} does not wait"
        del self._requests[request.key]
        self._ranking.discard(request.key)

    def first(self) -> Request | None:
        key = self._ranking.first()
        return None if key is None else self._requests[key]

    def check_integrity(self) -> None:
        assert len(self._ranking) == len(self._requests)
        assert all(key in self._ranking for key in self._requests)
        self._ranking.check_integrity()
