"""Events of one stream that differ in their text only, told apart from others without parsing them.

Most events of an answer repeat the one before, but for the text of a delta. What such an event says depends on that
text being there, not on what it is. So the bytes before and after it, once they are known to be those of an event that
was parsed, tell what the next one says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from sloscope.sse import StreamEvent

_MAX_FRAME_BYTES = 4096  # around the text; a larger one is not kept
_KEY = re.compile(rb'"(?:content|text|reasoning_content|reasoning)": ?"')
# The inside of a JSON string that is not empty. Whether it is UTF-8 makes no difference to the decoder.
_TEXT = re.compile(rb'(?!\Z)[^"\\\x00-\x1f]*(?:\\(?:["\\/bfnrt]|u[0-9A-Fa-f]{4})[^"\\\x00-\x1f]*)*')


_NOT_PLAIN = b'"\\' + bytes(range(0x20))  # of a JSON string's inside, what begins an escape or ends it
# Data, start and stop of the payload in it, and what else its observer knows of the read.
Read = tuple[bytes, int, int, int, int, int]


class Pattern(NamedTuple):
    """`before`, any text that is not empty, `after`: such a read says what `event` says."""

    before: bytes
    after: bytes
    event: StreamEvent

    def fits(self, read: bytes) -> bool:
        before, after, _ = self
        return (
            read.startswith(before)
            and read.endswith(after)
            and _TEXT.fullmatch(read, len(before), len(read) - len(after)) is not None
        )

    def count(self, reads: Sequence[Read]) -> int:
        """How many of these fit, up to the first that does not."""
        before, after, _ = self
        head, tail = len(before), len(after)
        texts: list[bytes] = []
        for data, start, stop, _, _, _ in reads:
            text = data[start + head : stop - tail]
            if not (text and data.startswith(before, start) and data.endswith(after, start, stop)):
                break
            texts.append(text)
        together = b"".join(texts)
        if len(together.translate(None, _NOT_PLAIN)) == len(together):
            return len(texts)
        return next((number for number, text in enumerate(texts) if not _TEXT.fullmatch(text)), len(texts))


def pattern_of(read: bytes, event: StreamEvent, decode: Callable[[bytes], StreamEvent | None]) -> Pattern | None:
    """The pattern of `read`, one whole event that says `event`. None where that is more than an output of one choice,
    or where its text is not to be found for certain.

    That the place is right is tried: another text there has to say the same, and no text has to say no output.
    """
    if len(event.outputs) != 1 or event.usage is not None or event.finishes or event.error or event.malformed:
        return None
    for key in _KEY.finditer(read):
        start = key.end()
        text = _TEXT.match(read, start)
        if text is None or read[text.end() : text.end() + 1] != b'"':
            continue
        before, after = read[:start], read[text.end() :]
        if len(before) + len(after) > _MAX_FRAME_BYTES:
            return None
        without = decode(before + after)
        if without is not None and not without.outputs and decode(b"%bx%b" % (before, after)) == event:
            return Pattern(before, after, event)
    return None
