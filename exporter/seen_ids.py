"""Which request ids were used lately."""

from __future__ import annotations

from collections import OrderedDict

from sloscope.ids import is_request_id

_REMEMBERED = 100_000


class SeenIds:
    """The latest request ids, so that a repeated one is not believed."""

    def __init__(self, size: int = _REMEMBERED) -> None:
        self._ids: OrderedDict[str, None] = OrderedDict()
        self._size = size

    def claim(self, request_id: str) -> bool:
        """True, once, for a well-formed id that was not claimed lately."""
        if not is_request_id(request_id) or request_id in self._ids:
            return False
        self._ids[request_id] = None
        if len(self._ids) > self._size:
            self._ids.popitem(last=False)
        return True
