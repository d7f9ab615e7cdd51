from typing import Any

import orjson
import pytest

from reference_server.openai_api import DONE, ApiError, ChunkBuilder, parse_body, usage

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
TEXT = {"model": "m", "prompt": "hello"}


def parse(body: Any, chat: bool = True) -> Any:
    return parse_body(orjson.dumps(body), chat)


def test_a_plain_chat_takes_the_defaults_of_the_api() -> None:
    request = parse(CHAT)
    assert request.messages == CHAT["messages"] and request.prompt is None
    assert (request.stream, request.temperature, request.top_p, request.seed) == (False, 1.0, 1.0, None)
    assert request.max_tokens is None and request.stop == ()


@pytest.mark.parametrize(
    "field",
    [
        {"n": 1}, {"logprobs": False}, {"logprobs": None}, {"frequency_penalty": 0}, {"presence_penalty": 0.0},
        {"logit_bias": {}}, {"response_format": {"type": "text"}}, {"tools": []}, {"user": "me"}, {"store": False},
        {"metadata": {"a": "b"}}, {"top_p": 1}, {"temperature": 0}, {"stop": None}, {"stream": False},
    ],
)  # fmt: skip
def test_a_parameter_that_asks_for_nothing_is_accepted(field: dict[str, Any]) -> None:
    parse(CHAT | field)


@pytest.mark.parametrize(
    ("field", "named"),
    [
        ({"n": 2}, "n: 2 is not accepted; accepted: 1"),
        ({"n": True}, "n: True is not accepted; accepted: 1"),
        ({"logprobs": True}, "logprobs: True is not accepted; accepted: false or 0"),
        ({"frequency_penalty": 0.5}, "frequency_penalty: 0.5 is not accepted; accepted: 0"),
        ({"tools": [{"type": "function"}]}, "tools: [{'type': 'function'}] is not accepted; accepted: []"),
        ({"response_format": {"type": "json_object"}}, "response_format: {'type': 'json_object'} is not accepted"),
        ({"temperature": 2.5}, "temperature: 2.5 is not accepted; accepted: a number from 0 to 2"),
        ({"temperature": "hot"}, "temperature: 'hot' is not accepted"),
        ({"top_p": 0}, "top_p: 0 is not accepted; accepted: a number above 0, at most 1"),
        ({"max_tokens": 0}, "max_tokens: 0 is not accepted; accepted: a whole number of tokens from 1 to 1000000"),
        ({"max_tokens": True}, "max_tokens: True is not accepted"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens: 1.5 is not accepted"),
        ({"stop": ["a"] * 5}, "stop: ['a', 'a', 'a', 'a', 'a'] is not accepted"),
        ({"stop": ""}, "stop: '' is not accepted; accepted: a text that is not empty, or a list of at most 4"),
        ({"seed": "x"}, "seed: 'x' is not accepted; accepted: a whole number of 64 bits"),
        ({"stream": 1}, "stream: 1 is not accepted; accepted: true or false"),
        ({"stream_options": {"include_usage": True}}, "stream_options: {'include_usage': True} is not accepted"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x: 1 is not accepted"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage: 1 is not accepted"),
        ({"messages": []}, "messages: this list is not accepted; accepted: a list of messages, not empty"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role: 'robot' is not accepted"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content: accepted"),
        ({"prompt": "x"}, "prompt: this str is not accepted; accepted: only model, stream"),
        ({"guided_json": {}}, "guided_json: this dict is not accepted; accepted: only model, stream"),
        ({"model": 7}, "model: 7 is not accepted; accepted: the name of a model, see /v1/models"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_with_field_value_and_what_is_accepted(
    field: dict[str, Any], named: str
) -> None:
    with pytest.raises(ApiError) as refused:
        parse(CHAT | field)
    assert named in refused.value.message and refused.value.status == 400
    assert refused.value.param in named


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff"])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError, match="body"):
        parse_body(body, chat=True)


@pytest.mark.parametrize("prompt", ["hi", [1, 2], ["hi"], [[1, 2]]])
def test_a_prompt_is_one_text_or_one_list_of_tokens(prompt: Any) -> None:
    assert parse(TEXT | {"prompt": prompt}, chat=False).prompt in ("hi", [1, 2])


@pytest.mark.parametrize("prompt", ["", [], [""], ["a", "b"], [[1], [2]], [1, "a"], [True], {"a": 1}])
def test_any_other_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(ApiError, match="prompt"):
        parse(TEXT | {"prompt": prompt}, chat=False)


def test_the_smaller_of_both_caps_counts() -> None:
    assert parse(CHAT | {"max_tokens": 5, "max_completion_tokens": 3}).max_tokens == 3


@pytest.mark.parametrize(
    "field",
    [
        {"messages": [{"role": "user", "content": {"text": "my secret"}}]}, {"messages": ["my secret"]},
        {"messages": "my secret"}, {"suffix": "my secret"}, {"input": "my secret"}, {"prompt": "my secret"},
    ],
)  # fmt: skip
def test_a_refused_content_is_never_echoed(field: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        parse(CHAT | field)
    assert "secret" not in refused.value.message


@pytest.mark.parametrize("opened", [b"[", b'{"a":'])
@pytest.mark.parametrize("name", [b"n", b"stop", b"model", b"unknown"])
def test_a_value_nested_as_deep_as_json_may_be_is_refused_like_any_other(name: bytes, opened: bytes) -> None:
    deep = opened * 1000 + b"1" + (b"]" if opened == b"[" else b"}") * 1000
    with pytest.raises(ApiError) as refused:
        parse_body(b'{"model":"m","messages":[{"role":"user","content":"x"}],"%s":%s}' % (name, deep), chat=True)
    assert refused.value.status == 400 and refused.value.param == name.decode()
    assert len(refused.value.message) < 300


def _payload(event: bytes) -> Any:
    assert event.startswith(b"data: ") and event.endswith(b"\n\n")
    return orjson.loads(event.removeprefix(b"data: "))


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("null_usage", [True, False])
def test_a_fast_text_chunk_is_what_the_slow_way_would_build(chat: bool, null_usage: bool) -> None:
    chunks = ChunkBuilder("id-1", "m", 7, chat, null_usage)
    text = 'quote " back\\slash\n@@ é 🙂'
    chunk = _payload(chunks.text(text))
    output = {"delta": {"content": text}} if chat else {"text": text}
    assert chunk == {
        "id": "id-1",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": 7,
        "model": "m",
        "choices": [{"index": 0, **output, "logprobs": None, "finish_reason": None}],
    } | ({"usage": None} if null_usage else {})


def test_continuous_usage_stands_in_every_chunk() -> None:
    chunks = ChunkBuilder("id", "m", 7, chat=True, null_usage=False)
    assert _payload(chunks.text("a", usage(3, 1)))["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4,
    }  # fmt: skip


def test_the_last_chunk_carries_the_timings() -> None:
    chunks = ChunkBuilder("id", "m", 7, chat=True, null_usage=True)
    finish = _payload(chunks.finish("stop", None, {"queue_ms": 1.5}))
    assert finish["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert finish["sloscope"] == {"queue_ms": 1.5} and finish["usage"] is None
    last = _payload(chunks.usage(usage(3, 2), {"queue_ms": 1.5}))
    assert last["choices"] == [] and last["usage"]["total_tokens"] == 5 and last["sloscope"] == {"queue_ms": 1.5}
    assert DONE == b"data: [DONE]\n\n"
