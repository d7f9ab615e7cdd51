"""What the decoder reads out of one event: outputs, finishes, usage, errors; on any JSON at all."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloscope.sse import Output, StreamDecoder, StreamEvent, Usage, parse_body


def decode(*reads: bytes, **options: Any) -> list[StreamEvent]:
    """Events of a stream that ends after these reads."""
    decoder = StreamDecoder(**options)
    events = [event for read in reads for event in decoder.feed(read)]
    return events + decoder.finish()


def event_of(obj: Any, loads: Any = json.loads) -> StreamEvent:
    (event,) = decode(b"data: " + json.dumps(obj).encode() + b"\n\n", loads=loads)
    return event


def chunk(delta: Any, **choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, **choice}]}


def tool_calls(*arguments: Any) -> dict[str, Any]:
    calls = [{"index": i, "function": {"name": "f", "arguments": a}} for i, a in enumerate(arguments)]
    return {"tool_calls": calls}


HELLO = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
HELLO_EVENT = StreamEvent(outputs=(Output(0, "content"),), recognised=True)
THOUGHT = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]


class TestOutput:
    @pytest.mark.parametrize(
        ("delta", "kind"),
        [
            ({"content": "a"}, "content"),
            ({"content": " "}, "content"),
            ({"content": "\n"}, "content"),
            ({"role": "assistant", "content": "a"}, "content"),
            ({"refusal": "no"}, "content"),
            ({"content": [{"type": "text", "text": "a"}]}, "content"),
            ({"content": THOUGHT}, "reasoning"),
            ({"content": [{"type": "thinking", "thinking": "hm"}]}, "reasoning"),
            ({"content": [*THOUGHT, {"type": "text", "text": "a"}]}, "content"),
            ({"reasoning_content": "hm"}, "reasoning"),
            ({"reasoning": "hm"}, "reasoning"),
            ({"content": "", "reasoning_content": "hm"}, "reasoning"),
            (tool_calls("{"), "tool"),
            (tool_calls("", "{"), "tool"),
            (tool_calls({"city": "Paris"}), "tool"),
            ({"tool_calls": {"index": 0, "function": {"arguments": "{"}}}, "tool"),
            ({"function_call": {"name": "f", "arguments": "{"}}, "tool"),
        ],
    )
    def test_text_of_any_kind_is_one_output(self, delta: dict[str, Any], kind: str) -> None:
        assert event_of(chunk(delta)).outputs == (Output(0, kind),)

    @pytest.mark.parametrize(
        "delta",
        [
            {},
            None,
            {"role": "assistant"},
            {"role": "assistant", "content": ""},
            {"role": "assistant", "content": None, "refusal": None},
            {"content": "", "reasoning_content": None, "tool_calls": None},
            {"content": []},
            {"content": [{"type": "text", "text": ""}]},
            {"content": [{"type": "thinking", "thinking": []}]},
            {"content": [{"type": "reference", "reference_ids": [1]}]},
            {"content": 5},
            {"reasoning_details": [{"type": "reasoning.encrypted", "data": "CikB"}]},
            {"tool_calls": []},
            tool_calls(""),
            tool_calls(None),
            {"tool_calls": [{"index": 0, "function": None}]},
            {"function_call": {"name": "f", "arguments": ""}},
        ],
    )
    def test_a_delta_without_text_is_no_output(self, delta: Any) -> None:
        event = event_of(chunk(delta))
        assert event.outputs == () and event.recognised and not event.malformed

    def test_content_wins_over_tool_and_tool_over_reasoning(self) -> None:
        everything = {"content": "a", "reasoning": "hm", **tool_calls("{")}
        assert event_of(chunk(everything)).outputs == (Output(0, "content"),)
        assert event_of(chunk(everything | {"content": ""})).outputs == (Output(0, "tool"),)

    def test_completion_text_is_content(self) -> None:
        assert event_of({"choices": [{"index": 0, "text": "a"}]}).outputs == (Output(0, "content"),)
        assert event_of({"choices": [{"index": 0, "text": ""}]}).outputs == ()

    @pytest.mark.parametrize("kind", ["chat", "completions"])
    def test_logprobs_beside_the_text_are_no_output_of_their_own(self, kind: str) -> None:
        def with_logprobs(text: str, **delta: Any) -> dict[str, Any]:
            if kind == "chat":
                tops = [{"token": "a", "logprob": -0.1, "bytes": [97]}, {"token": 'b"}', "logprob": -2, "bytes": None}]
                listed = {"content": [{"token": "a", "logprob": -0.1, "bytes": [97], "top_logprobs": tops}]}
                return chunk({"content": text, **delta}, logprobs=listed)
            listed = {"tokens": ["a"], "token_logprobs": [-0.1], "top_logprobs": [{"a": -0.1}], "text_offset": [0]}
            return {"choices": [{"index": 0, "text": text, "logprobs": listed}]}

        assert event_of(with_logprobs("a")) == StreamEvent(outputs=(Output(0, "content"),), recognised=True)
        assert event_of(with_logprobs("")) == StreamEvent(recognised=True)

    def test_text_beside_a_delta_that_repeats_it_is_one_output(self) -> None:
        assert event_of(chunk({"content": "a"}, text="a")).outputs == (Output(0, "content"),)

    def test_a_message_beside_a_delta_is_not_output(self) -> None:
        """It sums up what was streamed before; the delta is what came now."""
        assert event_of(chunk({}, message={"content": "the whole answer"})).outputs == ()

    def test_every_choice_of_an_event_has_its_own_output(self) -> None:
        choices = [
            {"index": 2, "delta": {"content": "a"}},
            {"index": 0, "delta": {"role": "assistant"}},
            {"index": 1, "delta": {"reasoning": "hm"}},
        ]
        assert event_of({"choices": choices}).outputs == (Output(2, "content"), Output(1, "reasoning"))

    def test_a_choice_that_stands_twice_in_an_event_is_one_output(self) -> None:
        choices = [{"index": 1, "delta": {"reasoning": "hm"}}, {"index": 1, "delta": {"content": "a"}}]
        assert event_of({"choices": choices}).outputs == (Output(1, "content"),)

    @pytest.mark.parametrize("index", [None, "0", -1, True, 1.5, 2**31])
    def test_an_unusable_index_falls_back_to_the_position(self, index: Any) -> None:
        choices = [{"index": index, "delta": {}}, {"index": index, "delta": {"content": "a"}}]
        assert event_of({"choices": choices}).outputs == (Output(1, "content"),)

    def test_half_a_surrogate_pair_is_output_under_a_strict_parser_too(self) -> None:
        data = b'data: {"choices":[{"index":0,"delta":{"content":"\\ud83d"}}]}\n\n'
        with pytest.raises(orjson.JSONDecodeError):
            orjson.loads(data[6:])
        assert decode(data, loads=orjson.loads) == [HELLO_EVENT]

    @pytest.mark.parametrize("loads", [json.loads, orjson.loads])
    def test_invalid_utf8_in_the_text_is_output(self, loads: Any) -> None:
        assert decode(HELLO.replace(b"hi", b"\xf0\x9f"), loads=loads) == [HELLO_EVENT]

    def test_the_text_is_never_kept(self) -> None:
        decoder = StreamDecoder()
        data = json.dumps(chunk({"content": "Zanzibar"}) | {"error": {"message": "Zanzibar"}}).encode()
        for line_end in (b"\n", b"\r\n"):
            (event,) = decoder.feed(b"event: x" + line_end + b"data: " + data + line_end * 2)
            state = [getattr(decoder, slot) for slot in StreamDecoder.__slots__]
            assert "Zanzibar" not in repr(event) + repr(state)


class TestFinishUsageModel:
    def test_a_finish_chunk_with_content_is_both(self) -> None:
        event = event_of(chunk({"content": "a"}, finish_reason="stop"))
        assert event.outputs == (Output(0, "content"),) and event.finishes == ((0, "stop"),)

    def test_finish_reasons_stand_as_sent_for_each_choice(self) -> None:
        choices = [
            {"index": 0, "delta": {}, "finish_reason": "eos_token"},
            {"index": 1, "delta": {}, "finish_reason": None},
            {"index": 2, "delta": {}, "finish_reason": ""},
            {"index": 3, "delta": {}, "finish_reason": "error"},
        ]
        event = event_of({"choices": choices})
        assert event.finishes == ((0, "eos_token"), (3, "error")) and event.error is None

    @pytest.mark.parametrize(
        "place",
        [
            lambda usage: chunk({}) | {"usage": usage},
            lambda usage: chunk({}) | {"x_groq": {"usage": usage}},
            lambda usage: chunk({}, usage=usage),
            lambda usage: chunk({}) | {"usage": None, "x_groq": {"id": "req"}} | chunk({}, usage=usage),
        ],
        ids=["top", "x_groq", "choice", "choice beside empty places"],
    )
    def test_usage_is_found_wherever_it_stands(self, place: Any) -> None:
        event = event_of(place({"prompt_tokens": 7, "completion_tokens": 0}))
        assert event.usage == Usage(7, 0) and not event.raw_usage_only

    def test_a_usage_only_chunk_is_no_output(self) -> None:
        event = event_of({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}})
        assert event == StreamEvent(usage=Usage(7, 5), recognised=True, raw_usage_only=True)

    def test_null_choices_are_no_choices(self) -> None:
        event = event_of({"choices": None, "usage": {"prompt_tokens": 7, "completion_tokens": 5}})
        assert event == StreamEvent(usage=Usage(7, 5), recognised=True, raw_usage_only=True)

    @pytest.mark.parametrize("bad", [None, "5", -1, 5.0, True, 2**31, 2**63])
    def test_a_count_that_is_none_is_null_and_never_zero(self, bad: Any) -> None:
        usage = {"prompt_tokens": bad, "completion_tokens": 5}
        assert event_of({"choices": [], "usage": usage}).usage == Usage(None, 5)
        assert event_of({"choices": [], "usage": {"prompt_tokens": bad}}).usage is None

    def test_an_empty_model_is_missing(self) -> None:
        assert event_of({"choices": [], "model": "m"}).model == "m"
        assert event_of({"choices": [], "model": ""}).model is None


class TestError:
    @pytest.mark.parametrize(
        ("error", "name"),
        [
            ({"message": "Out of memory", "type": "server_error", "code": None}, "server_error"),
            ({"message": "m", "type": "invalid_request_error", "code": "tool_use_failed"}, "tool_use_failed"),
            ({"message": "m", "type": "BadRequestError", "code": 400}, "400"),
            ({"message": "m", "code": -32000}, "-32000"),
            ({"message": "m"}, "error event"),
            ({"message": "m", "code": "a whole sentence of text"}, "error event"),
            ({"message": "m", "code": 10**9, "type": "x" * 65}, "error event"),
            ({"message": "m", "type": "error"}, "error event"),
            ("Request failed during generation", "error event"),
            (["m"], "error event"),
        ],
    )
    def test_an_error_is_named_by_code_or_type_and_never_by_its_text(self, error: Any, name: str) -> None:
        assert event_of({"error": error}) == StreamEvent(error=name, recognised=True)

    def test_the_type_beside_an_error_string_names_it(self) -> None:
        assert event_of({"error": "Request failed", "error_type": "generation"}).error == "generation"

    def test_an_error_beside_choices_leaves_their_output_alone(self) -> None:
        event = event_of(chunk({"content": "a"}) | {"error": {"code": 502}})
        assert event.error == "502" and event.outputs == (Output(0, "content"),)

    def test_an_error_inside_a_choice_counts(self) -> None:
        event = event_of(chunk({}, error={"code": 502}, finish_reason="error"))
        assert event.error == "502" and event.finishes == ((0, "error"),)

    @pytest.mark.parametrize("error", [None, {}, ""])
    def test_an_empty_error_beside_choices_is_none(self, error: Any) -> None:
        assert event_of(chunk({"content": "a"}) | {"error": error}) == HELLO_EVENT

    def test_an_error_object_of_older_servers_counts(self) -> None:
        event = event_of({"object": "error", "message": "m", "type": "BadRequestError", "code": None})
        assert event.error == "BadRequestError"

    def test_an_error_event_counts_whatever_its_data(self) -> None:
        assert decode(b"event: error\n\n") == [StreamEvent(error="error event", recognised=True)]
        assert decode(b"event: error\ndata: \n\n") == [StreamEvent(error="error event", recognised=True)]
        assert decode(b"event: error\ndata: lost\n\n") == [StreamEvent(error="error event", malformed=True)]
        assert decode(b'event:error\ndata: {"code": "ERR"}\n\n') == [StreamEvent(error="ERR")]
        assert decode(b'data: {"error": {"code": 1}}\nevent: error\n\n')[0].error == "1"
        assert decode(b"event: error\ndata: [DONE]\n\n")[0].error == "error event"

    def test_an_error_field_reads_as_an_error_event(self) -> None:
        assert decode(b'error: {"code":500,"message":"m"}\n\n') == [StreamEvent(error="500")]

    def test_an_event_type_ends_with_its_event(self) -> None:
        assert decode(b"event: error\nevent: message\n" + HELLO) == [HELLO_EVENT]
        assert decode(b"event: error\n\n" + HELLO)[1] == HELLO_EVENT


class TestMalformed:
    @pytest.mark.parametrize("data", ["{", "null", "5", '"[DONE]"', "[]", "[1]", "[[]", "DONE", "nonsense at length"])
    def test_data_that_is_no_object_is_malformed(self, data: str) -> None:
        assert decode(f"data: {data}\n\n".encode()) == [StreamEvent(malformed=True)]

    def test_nesting_beyond_the_parser_is_malformed(self) -> None:
        assert decode(b"data: " + b'{"a":' * 100_000 + b"\n\n") == [StreamEvent(malformed=True)]

    def test_a_number_beyond_the_parser_is_malformed(self) -> None:
        assert decode(b'data: {"usage":' + b"1" * 5000 + b"}\n\n") == [StreamEvent(malformed=True)]

    @pytest.mark.parametrize("choices", [{}, "x", 1, [None], ["x"], [{"delta": "a"}], [{"delta": ["a"]}]])
    def test_choices_of_the_wrong_shape_are_malformed(self, choices: Any) -> None:
        assert event_of({"choices": choices}) == StreamEvent(malformed=True, recognised=True)

    def test_what_can_be_read_of_a_malformed_event_still_counts(self) -> None:
        event = event_of({"choices": [None, {"index": 1, "delta": {"content": "a"}}], "model": "m"})
        assert event == StreamEvent(outputs=(Output(1, "content"),), model="m", malformed=True, recognised=True)

    def test_other_dialects_are_not_recognised(self) -> None:
        anthropic = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}}
        responses = {"type": "response.output_text.delta", "delta": "a", "output_index": 0}
        assert event_of(anthropic) == event_of(responses) == StreamEvent()


class TestBody:
    def test_a_body_is_judged_by_its_message(self) -> None:
        choices = [
            {"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"},
            {"index": 1, "message": {"content": None, **tool_calls("{}")}, "finish_reason": "tool_calls"},
            {"index": 2, "message": {"content": "", "reasoning_content": "hm"}, "finish_reason": "length"},
        ]
        usage = {"prompt_tokens": 7, "completion_tokens": 5}
        body = json.dumps({"model": "m", "choices": choices, "usage": usage}).encode()
        expected = StreamEvent(
            outputs=(Output(0, "content"), Output(1, "tool"), Output(2, "reasoning")),
            finishes=((0, "stop"), (1, "tool_calls"), (2, "length")),
            usage=Usage(7, 5),
            model="m",
            recognised=True,
        )
        assert parse_body(body) == parse_body(body, orjson.loads) == parse_body(b"\xef\xbb\xbf" + body) == expected

    def test_a_completion_body_is_judged_by_its_text(self) -> None:
        body = json.dumps({"choices": [{"text": "a", "index": 0, "finish_reason": "length"}]}, indent=1)
        event = parse_body(body.encode())
        assert event.outputs == (Output(0, "content"),) and event.finishes == ((0, "length"),)

    def test_an_error_body_names_its_error(self) -> None:
        assert parse_body(b'{"error":{"message":"m","type":"overloaded_error"}}').error == "overloaded_error"

    @pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"[DONE]", b"\xff"])
    def test_a_body_that_is_no_object_is_malformed(self, body: bytes) -> None:
        assert parse_body(body) == StreamEvent(malformed=True)


KEYS = ["choices", "delta", "message", "content", "text", "thinking", "tool_calls", "function", "arguments"]
MORE_KEYS = ["index", "usage", "prompt_tokens", "error", "code", "finish_reason", "model", "x_groq", "object"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "a", "stop"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*KEYS, *MORE_KEYS]), inner, max_size=5)
    ),
    max_leaves=20,
)


@settings(max_examples=400, deadline=None)
@given(JSON, JSON, JSON)
def test_no_json_raises(choice: Any, delta: Any, rest: Any) -> None:
    obj = {"choices": [choice, {"delta": delta}]} | (rest if isinstance(rest, dict) else {})
    event = parse_body(json.dumps(obj).encode())
    assert event.recognised
    assert all(output.type in ("content", "reasoning", "tool") for output in event.outputs)
    assert len({output.choice for output in event.outputs}) == len(event.outputs)
