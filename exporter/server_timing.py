"""`Server-Timing` of a response: what hops that are not ours say about the time they took. No I/O."""

from __future__ import annotations

import re
from decimal import Decimal

_MOST = 16  # durations
_MOST_READ = 64  # entries, whatever they hold
_LONGEST = 4 << 10  # characters that are looked at, of a header of up to 64 KiB
_LONGEST_NS = 10**15  # eleven days: beyond, it is no duration of a hop
_NS_PER_MS = 1_000_000
_TOKEN = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,64}"
_QUOTED = r'"(?:[^"\\]|\\.)*"'
_PARAM = re.compile(rf"[ \t]*;[ \t]*({_TOKEN})[ \t]*(?:=[ \t]*({_TOKEN}|{_QUOTED}))?")
_NAME = re.compile(rf"[ \t]*({_TOKEN})")
_NO_MORE = re.compile(r"[ \t]*(?:,|\Z)")
_ENTRY_END = re.compile(rf"(?:[^,\"]|{_QUOTED})*(?:,|\Z)")
_MS = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,15})?")


def durations_ns(header: str) -> dict[str, int]:
    """Duration by name, as far as it is told: entries without a `dur` and what is malformed are left out, and of a
    repeated name the first counts. Descriptions are free text and are dropped, and so is what is beyond 4 KiB
    or 64 entries.

    Source: W3C Server Timing; `dur` is in milliseconds.
    """
    if len(header) > _LONGEST:
        # An entry that the cut goes through is not read: half a number would be another number.
        header = header[: header.rfind(",", 0, _LONGEST) + 1]
    found: dict[str, int] = {}
    at = 0
    for _ in range(_MOST_READ):
        if at >= len(header) or len(found) == _MOST:
            break
        name = _NAME.match(header, at)
        if name is not None:
            at = name.end()
            duration_ns = None
            while param := _PARAM.match(header, at):
                at = param.end()
                if param[1].lower() == "dur" and duration_ns is None:
                    duration_ns = _ns(param[2] or "")
            if duration_ns is not None and name[1] not in found and _NO_MORE.match(header, at):
                found[name[1]] = duration_ns
        end = _ENTRY_END.match(header, at)
        if end is None:
            break  # a quote that nobody closed: where the next entry would begin is not known
        at = max(end.end(), at + 1)
    return found


def _ns(text: str) -> int | None:
    text = text.strip('"')
    if _MS.fullmatch(text) is None:
        return None
    ns = int(Decimal(text) * _NS_PER_MS)
    return ns if ns <= _LONGEST_NS else None
