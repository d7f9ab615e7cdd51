"""Asking an upstream for the usage of a stream, and keeping the answer from a client that did not ask. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from sloscope.sse import StreamDecoder

# Of a request: they speak of its body as it was sent, so that a server could take a changed one for a forged one.
_VOUCHERS = frozenset(
    {"content-digest", "content-encoding", "content-md5", "digest", "repr-digest", "signature", "signature-input"}
)
_OPTION = b'"stream_options":{"include_usage":true},'
_BLANK_LINE = re.compile(rb"\r?\n\r?\n|\r\r")
_LONGEST = 8 << 10  # bytes: an event beyond is no mere usage
_BLANK = b" \t\r\n"


def asking(body: bytes, asked: Mapping[str, Any], headers: Iterable[str] = ()) -> bytes | None:
    """The body with the option put in front, every other byte as it was. None: leave the body as it is, since it asks
    for no stream, says itself which options it wants, or is vouched for by one of the `headers` (names in lower case).
    """
    if asked.get("stream") is not True or "stream_options" in asked or not _VOUCHERS.isdisjoint(headers):
        return None
    at = len(body) - len(body.lstrip(_BLANK)) + 1
    return body[:at] + _OPTION + body[at:]


class UsageFilter:
    """The bytes of an event stream without the events that hold usage and no choices, however they are cut.

    Of an event that is not complete nothing is passed on, unless it is too long to be one of those. No event waits for
    another.
    """

    def __init__(self) -> None:
        self._begun = b""  # of an event that is not complete
        self._passing = False  # the rest of an event whose beginning was passed on

    def feed(self, data: bytes) -> bytes:
        data = self._begun + data
        kept: list[bytes] = []
        at = 0
        for blank in _BLANK_LINE.finditer(data):
            event = data[at : blank.end()]
            if self._passing or not _is_usage_only(event):
                kept.append(event)
            self._passing = False
            at = blank.end()
        self._begun = data[at:]
        if self._passing or len(self._begun) > _LONGEST:
            # A line end stays, since the next one may make it a blank line.
            whole = len(self._begun.rstrip(b"\r\n"))
            kept.append(self._begun[:whole])
            self._begun = self._begun[whole:]
            self._passing = True
        return b"".join(kept)

    def finish(self) -> bytes:
        """What was begun when the stream ended."""
        begun, self._begun = self._begun, b""
        return b"" if not self._passing and _is_usage_only(begun + b"\n\n") else begun


def _is_usage_only(event: bytes) -> bool:
    if b'"usage"' not in event:
        return False
    found = StreamDecoder(orjson.loads).feed(event)
    return len(found) == 1 and found[0].raw_usage_only
