"""Server-sent events of OpenAI-compatible servers: bytes in, classified events out.

No I/O and no clock: whoever reads the socket stamps the read, then feeds it here. An event
says *that* output came, of what kind and for which choice; the output's text is never kept.

Framing follows the WHATWG event stream (line ends LF, CR, CRLF in any mixture; comments; a BOM
at the start only; `data:` with or without a space; several data lines make one event), and
differs from it in four places, each because real servers do:

- End of stream. WHATWG discards an event that no blank line closed. Here it is dispatched if
  it is whole: `[DONE]` or a JSON object, which cannot parse when cut short. See `finish`.
- `event: error` is dispatched even without data.
- `error: {...}` as a field, which older llama.cpp servers write, is read as `event: error`.
- Data that is blank (a heartbeat) is not dispatched.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sloscope.sse_pattern import Pattern, Read, pattern_of

CONTENT = "content"
REASONING = "reasoning"
TOOL = "tool"

_BOM = b"\xef\xbb\xbf"
_COLON = ord(":")
_LF = ord("\n")
_COMMENT = b":"
_DONE = b"[DONE]"
_MAX_TOKENS = 2**31 - 1  # more than any answer has, and few enough that sums over many fit a column
_MAX_CHOICE = 2**31 - 1
_MAX_ERROR_CODE = 10**9
_TRIES = 16

# What may stand as an error's class. Anything longer or with blanks in it could be message text.
_ERROR_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,63}")
_UNNAMED_ERROR = "error event"


class Output(NamedTuple):
    """One choice carried output in one event. `type` is content, reasoning or tool."""

    choice: int
    type: str


class Usage(NamedTuple):
    """Token counts as the server states them; None where it states none."""

    prompt_tokens: int | None
    completion_tokens: int | None


@dataclass(slots=True)
class StreamEvent:
    """One dispatched event: its data was not blank, or it was an error event.

    outputs: one entry per choice that carried output. Content (refusals and completion text
        are content) wins over tool-call arguments, those over reasoning. Empty and role-only
        deltas, a tool call's bare name, usage and `[DONE]` carry none.
    finishes: (choice, finish_reason as sent), not normalised.
    usage: final or continuous, from `usage`, `x_groq.usage` or `choices[].usage`.
    error: class of an in-band error: its code, else its type, else "error event". Never its text.
    model: as sent; None where absent or empty.
    malformed: the data is no JSON object, or `choices` has the wrong shape. What could be read
        of such an object still stands in the other fields.
    recognised: has `choices` or `error`, or is `[DONE]`. False for Anthropic and Responses API
        events, whose output this decoder does not see.
    raw_usage_only: `choices` is empty and usage is present.
    """

    outputs: tuple[Output, ...] = ()
    finishes: tuple[tuple[int, str], ...] = ()
    usage: Usage | None = None
    error: str | None = None
    done: bool = False
    model: str | None = None
    malformed: bool = False
    recognised: bool = False
    raw_usage_only: bool = False


class StreamDecoder:
    """Turns the body of one streamed response, cut anywhere, into events.

    Every cut of the same bytes gives the same events. No bytes make it raise, and the cost is
    linear in them, even fed one at a time.

    loads: the JSON parser. What it refuses is tried once more with `json.loads` and undecodable
        UTF-8 replaced, so that half of a surrogate pair or a NaN does not hide an output event.
    max_event_bytes: bound on one field line and on the data of one event, in bytes. An event
        beyond it is skipped up to the next blank line and counted in `oversized`.
    """

    __slots__ = (
        "_after_cr",
        "_at_start",
        "_data",
        "_data_bytes",
        "_idle",
        "_is_error",
        "_loads",
        "_max_event_bytes",
        "_named",
        "_pattern",
        "_skipping",
        "_tail",
        "_tries",
        "oversized",
        "torn",
    )

    def __init__(self, loads: Callable[[bytes], Any] = json.loads, *, max_event_bytes: int = 8 << 20) -> None:
        self.oversized = 0
        # True after `finish` if the stream ended inside a line or an event that was not dispatched.
        self.torn = False
        self._loads = loads
        self._max_event_bytes = max_event_bytes
        self._at_start = True  # a BOM may still come
        self._after_cr = False  # a CR ended the last read: an LF at the start of the next belongs to it
        self._tail = bytearray()  # the line begun; of a comment or a skipped line, only ":"
        self._data: list[bytes] = []  # values of the data lines of the event begun
        self._data_bytes = 0  # their size once joined
        self._named = False  # the event begun has an `event:` line
        self._is_error = False  # ... and it says error
        self._skipping = False  # an oversized event: drop lines up to a blank one
        self._idle = False  # between two events, nothing kept: the next read may take the short path
        self._pattern: Pattern | None = None  # of an earlier read
        self._tries = _TRIES  # at finding one, until one that is found fits

    def _known(self, data: bytes) -> StreamEvent | None:
        """The event that these bytes are, if they are a whole one that differs from an earlier one in its text only."""
        pattern = self._pattern
        if pattern is None or not self._idle or not pattern.fits(data) or len(data) - 2 > self._max_event_bytes:
            return None
        self._tries = _TRIES
        return pattern.event

    def alike(self, reads: Sequence[Read]) -> tuple[int, Output | None]:
        """How many of these reads, from the first on, are each one event with the same output and nothing more. They
        are not to be fed. Each is shorter than the bound of an event.
        """
        pattern = self._pattern
        if pattern is None or not self._idle or not self._tries:
            return 0, None
        count = pattern.count(reads)
        if count:
            self._tries = _TRIES
        return count, pattern.event.outputs[0]

    def feed(self, data: bytes) -> list[StreamEvent]:
        """The events that these bytes complete, in order.

        An event is complete with the line end of its blank line; where that is a CR, it does
        not wait for an LF that may follow, because between two events that could be long.
        """
        event = self._known(data)
        if event is not None:
            return [event]
        # Most reads hold exactly one event, `data: {...}\n\n`.
        if self._idle and data.startswith(b"data:") and data.endswith(b"\n\n"):
            last = len(data) - 2
            if data.find(b"\n") == last and b"\r" not in data and last <= self._max_event_bytes:
                event = self._decode_read(data)
                if event is None:
                    return []
                if self._tries:
                    self._tries -= 1
                    self._pattern = pattern_of(data, event, self._decode_read)
                return [event]

        if self._at_start:
            data = bytes(self._tail) + data
            self._tail.clear()
            if len(data) < len(_BOM) and _BOM.startswith(data):
                self._tail += data
                return []
            self._at_start = False
            data = data.removeprefix(_BOM)
        if self._after_cr and data:
            self._after_cr = False
            if data[0] == _LF:
                data = data[1:]
        if not data:
            return []

        #   data: ....line\n....line\n..line begun
        #         |--- whole lines --|            cut is 0 when no line ends here
        if data.endswith(b"\n"):
            cut = len(data)
        else:
            cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
            self._after_cr = data.endswith(b"\r")
        events: list[StreamEvent] = []
        if cut:
            lines = data[:cut]
            if self._tail:
                lines = bytes(self._tail) + lines
                self._tail.clear()
            # On bytes, splitlines knows LF, CR and CRLF and nothing else.
            for line in lines.splitlines():
                if line:
                    self._field(line)
                else:
                    self._blank_line(events)
        if cut < len(data):
            self._begin_line(data[cut:])
        self._idle = not (self._tail or self._data or self._named or self._skipping or self._after_cr)
        return events

    def finish(self) -> list[StreamEvent]:
        """End of stream: the last event if it is whole though no blank line closed it.

        Whole is `[DONE]`, a JSON object, or anything announced by `event: error`. Servers do
        end with a bare `data: [DONE]`. Whatever else is left over is discarded, and `torn` set.
        """
        line = bytes(self._tail)
        self._tail.clear()
        if line.startswith((b"data:", b"error:")):
            self._field(line)
        elif line and not line.startswith(_COMMENT):
            self.torn = True
        data = b"\n".join(self._data)
        event = self._decode(data, self._is_error)
        is_whole = event is not None and (event.recognised or not event.malformed)
        if not (is_whole and data.strip()):
            self.torn |= bool(self._data) or self._named or self._skipping
            event = StreamEvent(error=_UNNAMED_ERROR, recognised=True) if self._is_error else None
        self._end_event()
        self._skipping = False
        return [] if event is None else [event]

    def _begin_line(self, begun: bytes) -> None:
        tail = self._tail
        tail += begun
        if tail[0] == _COLON:
            del tail[1:]
        elif len(tail) > self._max_event_bytes:
            self._skip_event()
            tail[:] = _COMMENT

    def _field(self, line: bytes) -> None:
        if line[0] == _COLON or self._skipping:
            return
        if len(line) > self._max_event_bytes:
            self._skip_event()
            return
        name, _, value = line.partition(b":")
        if value.startswith(b" "):
            value = value[1:]
        if name == b"event":
            self._named = True
            self._is_error = value == b"error"
            return
        if name == b"error":
            self._is_error = True
        elif name != b"data":
            return
        # A newline joins two data lines.
        self._data_bytes += len(value) + (1 if self._data else 0)
        self._data.append(value)
        if self._data_bytes > self._max_event_bytes:
            self._skip_event()

    def _blank_line(self, events: list[StreamEvent]) -> None:
        if self._data or self._is_error:
            data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
            event = self._decode(data, self._is_error)
            if event is not None:
                events.append(event)
        self._end_event()
        self._skipping = False

    def _end_event(self) -> None:
        self._data.clear()
        self._data_bytes = 0
        self._named = self._is_error = False

    def _skip_event(self) -> None:
        if not self._skipping:
            self._skipping = True
            self.oversized += 1
            self._end_event()

    def _decode_read(self, read: bytes) -> StreamEvent | None:
        """Of `data:…\\n\\n`."""
        return self._decode(read[5:-2], False)

    def _decode(self, data: bytes, is_error: bool) -> StreamEvent | None:
        if len(data) < 16:
            word = data.strip()
            if not word:
                return StreamEvent(error=_UNNAMED_ERROR, recognised=True) if is_error else None
            if word == _DONE:
                return StreamEvent(done=True, recognised=True, error=_UNNAMED_ERROR if is_error else None)
        elif data.isspace():
            return StreamEvent(error=_UNNAMED_ERROR, recognised=True) if is_error else None
        return _classify(_parse(data, self._loads), is_error)


def parse_body(data: bytes, loads: Callable[[bytes], Any] = json.loads) -> StreamEvent:
    """The body of a response that did not stream, under the same rules. Never raises."""
    return _classify(_parse(data.removeprefix(_BOM), loads), False)


def _parse(data: bytes, loads: Callable[[bytes], Any]) -> Any:
    """None stands for "no JSON" as well as for a JSON null: neither is an object."""
    try:
        return loads(data)
    except Exception:  # the parser is the caller's, and so are its errors
        try:
            return json.loads(data.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            return None


_ONLY_CHOICE_0 = {kind: (Output(0, kind),) for kind in (CONTENT, REASONING, TOOL)}
_RANK = {CONTENT: 3, TOOL: 2, REASONING: 1}


def _classify(obj: Any, is_error: bool) -> StreamEvent:
    if not isinstance(obj, dict):
        return StreamEvent(error=_UNNAMED_ERROR if is_error else None, malformed=True)
    model = obj.get("model")
    if not isinstance(model, str) or not model:
        model = None
    usage = _usage(obj["usage"]) if obj.get("usage") else None
    if usage is None and "x_groq" in obj:
        groq = obj["x_groq"]
        usage = _usage(groq.get("usage")) if isinstance(groq, dict) else None
    error = None
    if obj.get("error"):
        error = _error_class(obj["error"], obj)
    elif is_error:
        error = _error_class(obj)

    choices = obj.get("choices")
    if isinstance(choices, list):
        malformed = False
    elif choices is None:  # absent, or the nil slice of a Go server
        if error is None and obj.get("object") == "error":
            error = _error_class(obj)
        malformed = False
        choices = []
    else:
        malformed = True
        choices = []

    kinds: dict[int, str] = {}
    finishes: list[tuple[int, str]] = []
    for position, choice in enumerate(choices):
        if not isinstance(choice, dict):
            malformed = True
            continue
        index = choice.get("index", position)
        if type(index) is not int or not 0 <= index <= _MAX_CHOICE:  # isinstance would take a bool
            index = position
        delta = choice.get("delta")
        kind = None
        if isinstance(delta, dict):
            kind = _kind(delta)
        elif delta is not None:
            malformed = True
        elif isinstance(choice.get("message"), dict):
            # Only without a delta: beside one it repeats it, or sums up what was streamed before.
            kind = _kind(choice["message"])
        if kind != CONTENT and _has_text(choice.get("text")):
            kind = CONTENT
        # Two entries of one choice in one event are still one output event of that choice.
        if kind is not None and (index not in kinds or _RANK[kind] > _RANK[kinds[index]]):
            kinds[index] = kind
        reason = choice.get("finish_reason")
        if reason and isinstance(reason, str):
            finishes.append((index, reason))
        if error is None and choice.get("error"):
            error = _error_class(choice["error"])
        if usage is None and choice.get("usage"):
            usage = _usage(choice["usage"])

    if not kinds:
        outputs: tuple[Output, ...] = ()
    elif len(kinds) == 1 and 0 in kinds:
        outputs = _ONLY_CHOICE_0[kinds[0]]
    else:
        outputs = tuple(Output(index, kind) for index, kind in kinds.items())
    return StreamEvent(
        outputs,
        tuple(finishes),
        usage,
        error,
        False,
        model,
        malformed,
        "choices" in obj or "error" in obj,
        usage is not None and not choices and not malformed and "choices" in obj,
    )


def _kind(delta: dict[str, Any]) -> str | None:
    """The kind of output a delta or a message carries; None if it carries none."""
    content = delta.get("content")
    if content:
        if isinstance(content, str):
            return CONTENT
        kind = _kind_of_parts(content)
    else:
        kind = None
    if kind == CONTENT or _has_text(delta.get("refusal")):
        return CONTENT
    if _has_arguments(delta.get("tool_calls")) or _has_arguments(delta.get("function_call")):
        return TOOL
    if kind or _has_text(delta.get("reasoning_content")) or _has_text(delta.get("reasoning")):
        return REASONING
    return None


def _kind_of_parts(parts: Any) -> str | None:
    """Content as a list of typed parts, which Mistral's reasoning models stream."""
    kind = None
    for part in parts if isinstance(parts, list) else ():
        if not isinstance(part, dict):
            continue
        if _has_text(part.get("text")) or _has_text(part.get("refusal")):
            return CONTENT
        thoughts = part.get("thinking")
        for thought in thoughts if isinstance(thoughts, list) else (part,):
            if isinstance(thought, dict) and _has_text(thought.get("text") or thought.get("thinking")):
                kind = REASONING
    return kind


def _has_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _has_arguments(calls: Any) -> bool:
    """Argument text in tool calls (a list, or a bare object as older TGI sends) or a function call.

    The name alone is no output: it comes at once or late as the server's parser likes.
    """
    if not calls:
        return False
    for call in calls if isinstance(calls, list) else (calls,):
        if isinstance(call, dict):
            function = call.get("function", call)
            arguments = function.get("arguments") if isinstance(function, dict) else None
            # Not every server encodes the arguments as a string.
            if arguments and isinstance(arguments, (str, dict)):
                return True
    return False


def _usage(value: Any) -> Usage | None:
    if not isinstance(value, dict):
        return None
    prompt_tokens = _count(value.get("prompt_tokens"))
    completion_tokens = _count(value.get("completion_tokens"))
    if prompt_tokens is None and completion_tokens is None:
        return None
    return Usage(prompt_tokens, completion_tokens)


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= _MAX_TOKENS else None


def _error_class(*places: Any) -> str:
    """The first code, else type, that stands in `places`. Message text is never looked at."""
    for place in places:
        if not isinstance(place, dict):
            continue
        for key in ("code", "type", "error_type"):
            value = place.get(key)
            if type(value) is int and abs(value) < _MAX_ERROR_CODE:
                return str(value)
            # {"type": "error"} says no more than that it is one.
            if isinstance(value, str) and value != "error" and _ERROR_WORD.fullmatch(value):
                return value
    return _UNNAMED_ERROR
