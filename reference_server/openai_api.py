"""The OpenAI-compatible surface: what a request body may say, and the bytes of the answer. No I/O.

A field that is not known, or asks for something that this server does not do, is an error that names field, value and
what is accepted: an answer that silently ignores a parameter is a wrong answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import Repr
from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"
MAX_STOP_STRINGS = 4


class ApiError(Exception):
    """An answer that is no success; `param` is the field at fault."""

    def __init__(
        self, status: int, message: str, *, kind: str = "invalid_request_error", param: str | None = None,
        code: str | None = None, retry_after_s: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        return error_body(self.message, self.kind, self.param, self.code)


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> bytes:
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


def error_event(message: str, kind: str, code: str) -> bytes:
    """An error after the 200: the stream ends with it, without [DONE]."""
    return b"data: " + error_body(message, kind, code=code) + b"\n\n"


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A body that was accepted. `prompt` is text or token ids for completions, None for chats."""

    model: str
    stream: bool
    include_usage: bool
    continuous_usage: bool
    max_tokens: int | None
    stop: tuple[str, ...]
    temperature: float
    top_p: float
    seed: int | None
    ignore_eos: bool
    prompt: str | list[int] | None = None
    messages: list[dict[str, str]] | None = None


# Fields of the API that ask for nothing at these values. Anything else there is not supported.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "min_p": (0,),
    "top_k": (-1, 0),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
_IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key")  # about the caller, not about the answer
_COMMON = (
    "model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "stop", "temperature", "top_p",
    "seed", "ignore_eos",
)  # fmt: skip
_ROLES = ("system", "developer", "user", "assistant")


# A body may be nested deeper than `repr` can follow, and be megabytes long.
_REPR = Repr()
_REPR.maxstring = _REPR.maxother = 60


def shown(value: object) -> str:
    """A value that was sent, short enough for one line."""
    text = _REPR.repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _refuse(field: str, value: object, accepted: str) -> ApiError:
    return ApiError(400, f"{field}: {shown(value)} is not accepted; accepted: {accepted}", param=field)


def _refuse_unseen(field: str, value: object, accepted: str) -> ApiError:
    """For a value that may be what people wrote. It is not echoed: answers get logged by others."""
    return ApiError(400, f"{field}: this {type(value).__name__} is not accepted; accepted: {accepted}", param=field)


def parse_body(body: bytes, chat: bool) -> CompletionRequest:
    """The request, or ApiError 400."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"body: not JSON ({error}); accepted: a JSON object") from None
    if not isinstance(document, dict):
        raise ApiError(400, f"body: {type(document).__name__} is not accepted; accepted: a JSON object")
    given = {name: value for name, value in document.items() if value is not None}
    known = (*_COMMON, "messages" if chat else "prompt")
    for name, value in given.items():
        if name in known or name in _IGNORED:
            continue
        if name not in _NEUTRAL:
            raise _refuse_unseen(name[:60], value, f"only {', '.join(known)}")
        # True == 1 in Python, but not in JSON.
        if not any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in _NEUTRAL[name]
        ):
            refuse = _refuse_unseen if name == "suffix" else _refuse  # a suffix is text of a prompt
            raise refuse(name, value, " or ".join(orjson.dumps(v).decode() for v in _NEUTRAL[name]))
    model = given.get("model")
    if not isinstance(model, str):
        raise _refuse("model", model, "the name of a model, see /v1/models")
    stream = _flag(given, "stream")
    options = _stream_options(given, stream)
    return CompletionRequest(
        model=model,
        stream=stream,
        include_usage=_flag(options, "include_usage", "stream_options."),
        continuous_usage=_flag(options, "continuous_usage_stats", "stream_options."),
        max_tokens=_max_tokens(given),
        stop=_stop(given.get("stop", [])),
        temperature=_number(given, "temperature", 1.0, "a number from 0 to 2", lambda v: 0 <= v <= 2),
        top_p=_number(given, "top_p", 1.0, "a number above 0, at most 1", lambda v: 0 < v <= 1),
        seed=_seed(given),
        ignore_eos=_flag(given, "ignore_eos"),
        prompt=None if chat else _prompt(given.get("prompt")),
        messages=_messages(given.get("messages")) if chat else None,
    )


def _flag(given: Mapping[str, Any], name: str, where: str = "") -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise _refuse(where + name, value, "true or false")
    return value


def _stream_options(given: Mapping[str, Any], stream: bool) -> dict[str, Any]:
    options = given.get("stream_options", {})
    if not isinstance(options, dict):
        raise _refuse("stream_options", options, "an object")
    if options and not stream:
        raise _refuse("stream_options", options, "only together with stream: true")
    for name, value in options.items():
        if name == "include_obfuscation" and value is False:
            continue
        if name not in ("include_usage", "continuous_usage_stats"):
            raise _refuse(f"stream_options.{name[:60]}", value, "only include_usage, continuous_usage_stats")
    return {name: value for name, value in options.items() if value is not None}


def _max_tokens(given: Mapping[str, Any]) -> int | None:
    value: int | None = None
    for name in ("max_tokens", "max_completion_tokens"):
        if name not in given:
            continue
        this = given[name]
        if not _is_int(this) or not 1 <= this <= 1_000_000:
            raise _refuse(name, this, "a whole number of tokens from 1 to 1000000")
        value = this if value is None else min(value, this)
    return value


def _stop(value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    accepted = f"a text that is not empty, or a list of at most {MAX_STOP_STRINGS}"
    if not isinstance(items, list) or len(items) > MAX_STOP_STRINGS:
        raise _refuse("stop", value, accepted)
    if not all(isinstance(item, str) and item for item in items):
        raise _refuse("stop", value, accepted)
    return tuple(items)


def _number(given: Mapping[str, Any], name: str, default: float, accepted: str, fits: Any) -> float:
    value = given.get(name, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not fits(value):
        raise _refuse(name, value, accepted)
    return float(value)


def _seed(given: Mapping[str, Any]) -> int | None:
    value = given.get("seed")
    if value is not None and not (_is_int(value) and -(2**63) <= value < 2**63):
        raise _refuse("seed", value, "a whole number of 64 bits")
    return value


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]  # a batch of one
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(_is_int(item) for item in value):
        return value
    raise _refuse_unseen("prompt", value, "one text or one list of token ids, not empty")


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise _refuse_unseen("messages", value, "a list of messages, not empty")
    messages = []
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            raise _refuse_unseen(f"messages[{i}]", message, "an object with role and content")
        role = message.get("role")
        if role not in _ROLES:
            raise _refuse(f"messages[{i}].role", role, ", ".join(_ROLES))
        content = _content(message.get("content"), f"messages[{i}].content")
        messages.append({"role": "system" if role == "developer" else role, "content": content})
    return messages


def _content(value: Any, field: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        texts = [part.get("text") for part in value if isinstance(part, dict) and part.get("type") == "text"]
        if len(texts) == len(value) and all(isinstance(text, str) for text in texts):
            return "".join(texts)  # type: ignore[arg-type]
    # The value is a prompt: it is never echoed.
    raise ApiError(400, f"{field}: accepted: a text, or a list of text parts", param=field)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# --- the answer ------------------------------------------------------------------------------------------------


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class ChunkBuilder:
    """The events of one stream. What never changes is encoded once; a token costs one JSON string.

    With `include_usage` every chunk but the last says `usage: null`, as the API has it; with continuous usage
    every chunk has its own.
    """

    def __init__(self, answer_id: str, model: str, created: int, chat: bool, null_usage: bool) -> None:
        self._chat = chat
        self._base = {
            "id": answer_id,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": created,
            "model": model,
        }
        self._null_usage = null_usage
        text = self._chunk({"content": "@@"} if chat else "@@", None, None)
        self._before, self._after = text.split(b'"@@"')
        self._after = self._after.removesuffix(b"}\n\n")

    def role(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""}, None, None)

    def text(self, text: str, used: Mapping[str, int] | None = None) -> bytes:
        chunk = self._before + orjson.dumps(text) + self._after
        if used is None:
            return chunk + b"}\n\n"
        return chunk.removesuffix(b',"usage":null') + b',"usage":' + orjson.dumps(used) + b"}\n\n"

    def finish(self, reason: str, used: Mapping[str, int] | None, timings: Mapping[str, Any] | None) -> bytes:
        return self._chunk({} if self._chat else "", reason, used, timings)

    def usage(self, used: Mapping[str, int], timings: Mapping[str, Any]) -> bytes:
        return _event(self._base | {"choices": [], "usage": used, "sloscope": timings})

    def _chunk(
        self,
        output: dict[str, str] | str,
        reason: str | None,
        used: Mapping[str, int] | None,
        timings: Mapping[str, Any] | None = None,
    ) -> bytes:
        key = "delta" if self._chat else "text"
        choice = {"index": 0, key: output, "logprobs": None, "finish_reason": reason}
        body: dict[str, Any] = self._base | {"choices": [choice]}
        if used is not None or self._null_usage:
            body["usage"] = used
        if timings is not None:
            body["sloscope"] = timings
        return _event(body)


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def whole_answer(
    answer_id: str,
    model: str,
    created: int,
    chat: bool,
    text: str,
    finish_reason: str,
    used: Mapping[str, int],
    timings: Mapping[str, Any],
) -> bytes:
    """The body of an answer that was not streamed."""
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
    if chat:
        choice["message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    return orjson.dumps(
        {
            "id": answer_id,
            "object": "chat.completion" if chat else "text_completion",
            "created": created,
            "model": model,
            "choices": [choice],
            "usage": used,
            "sloscope": timings,
        }
    )
