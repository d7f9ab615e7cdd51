"""Tokens to text and back, text that grows, and chat prompts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_server.builtin import CONTROL_TOKENS, make_builtin
from reference_server.tokenizer import Tokenizer, TokenizerSpec, byte_alphabet, find_end_tokens
from sloscope.errors import ModelFileError

BUILTIN = Tokenizer(make_builtin().tokenizer)


def byte_tokenizer(pre: str = "gpt-2", merges: tuple[str, ...] = (), **changes: object) -> Tokenizer:
    """One token per byte, then one per merge, after a control token 0."""
    tokens = ("<|end|>", *byte_alphabet(), *(merge.replace(" ", "") for merge in merges))
    spec = {"bos_id": None, "eos_ids": (0,), "add_bos": False, "chat_template": None} | changes
    return Tokenizer(TokenizerSpec(tokens, merges, frozenset({0}), pre, **spec))  # type: ignore[arg-type]


def ids_of_bytes(tokenizer: Tokenizer, data: bytes) -> list[int]:
    by_bytes = {tokenizer.token_bytes(i): i for i in range(1, 257)}
    return [by_bytes[bytes([byte])] for byte in data]


@given(st.text().filter(lambda text: not any(control in text for control in CONTROL_TOKENS)))
@settings(max_examples=200, deadline=None)
def test_any_text_without_control_tokens_survives_encoding_and_decoding(text: str) -> None:
    text = text.encode("utf-8", errors="ignore").decode()  # lone surrogates are not text
    assert BUILTIN.decode(BUILTIN.encode(text)) == text


@given(st.binary(max_size=40))
@settings(max_examples=300, deadline=None)
def test_streamed_pieces_add_up_to_the_whole_and_are_always_valid(data: bytes) -> None:
    tokenizer = byte_tokenizer()
    stream = tokenizer.text_stream()
    ids = ids_of_bytes(tokenizer, data)
    pieces = [stream.push(i) for i in ids] + [stream.finish()]
    assert "".join(pieces) == tokenizer.decode(ids)


def test_half_a_character_is_held_back_until_it_is_whole() -> None:
    tokenizer = byte_tokenizer()
    stream = tokenizer.text_stream()
    assert [stream.push(i) for i in ids_of_bytes(tokenizer, "é😀".encode())] == ["", "é", "", "", "", "😀"]
    assert stream.finish() == ""


def test_half_a_character_at_the_end_becomes_a_replacement_character() -> None:
    tokenizer = byte_tokenizer()
    stream = tokenizer.text_stream()
    assert [stream.push(i) for i in ids_of_bytes(tokenizer, "😀".encode()[:3])] == ["", "", ""]
    assert stream.finish() == "\ufffd"


def test_control_tokens_leave_no_text() -> None:
    tokenizer = byte_tokenizer()
    stream = tokenizer.text_stream()
    assert tokenizer.encode("a<|end|>b")[1] == 0
    assert [stream.push(i) for i in tokenizer.encode("a<|end|>b")] == ["a", "", "b"]


def run_stream(text: str, stop: list[str]) -> tuple[list[str], str | None]:
    tokenizer = byte_tokenizer()
    stream = tokenizer.text_stream(stop)
    pieces = []
    for i in ids_of_bytes(tokenizer, text.encode()):
        pieces.append(stream.push(i))
        if stream.stopped_by is not None:
            break
    pieces.append(stream.finish())
    return pieces, stream.stopped_by


def test_what_may_begin_a_stop_string_is_held_back_and_released_when_it_does_not() -> None:
    assert run_stream("aENx", ["END"]) == (["a", "", "", "ENx", ""], None)


def test_a_stop_string_and_what_follows_are_not_sent() -> None:
    assert run_stream("abENDcd", ["END"]) == (["a", "b", "", "", "", ""], "END")


def test_a_beginning_of_a_stop_string_is_sent_when_the_answer_ends_there() -> None:
    assert run_stream("aEN", ["END"]) == (["a", "", "", "EN"], None)


def test_a_stop_string_may_begin_inside_its_own_beginning() -> None:
    # After "aab" of "aabaaac" the last "aa" begins "aaac" again.
    assert run_stream("xaabaaac", ["aaac"]) == (["x", "", "", "aab", "", "", "", "", ""], "aaac")


def test_the_earliest_of_several_stop_strings_wins() -> None:
    assert run_stream("one two\n\nthree", ["\n\n", "two"])[1] == "two"
    # One token may bring both.
    tokenizer = byte_tokenizer(merges=("X Y", "XY Z"))
    stream = tokenizer.text_stream(["Z", "Y"])
    assert stream.push(258) == "X" and stream.stopped_by == "Y"


@given(st.text(alphabet="ab", max_size=12), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3))
@settings(max_examples=300, deadline=None)
def test_streamed_text_is_the_whole_text_up_to_the_first_stop(text: str, stop: list[str]) -> None:
    pieces, stopped_by = run_stream(text, stop)
    # The stop string that is complete first ends the answer.
    for end in range(1, len(text) + 1):
        found = [at for s in stop if (at := text[:end].find(s)) >= 0]
        if found:
            assert "".join(pieces) == text[: min(found)] and stopped_by is not None
            break
    else:
        assert "".join(pieces) == text and stopped_by is None


def test_smollm_cuts_every_digit_off_and_gpt2_does_not() -> None:
    merges = ("1 2", "Ġ Ġ", "Ġ 1")
    text = "  12"
    as_bytes = [[b"  ", b"1", b"2"], [b" ", b" 1", b"2"]]
    for pre, expected in zip(("smollm", "gpt-2"), as_bytes, strict=True):
        tokenizer = byte_tokenizer(pre, merges=("Ġ Ġ", "Ġ 1"))
        assert [tokenizer.token_bytes(i) for i in tokenizer.encode(text)] == expected
    joined = byte_tokenizer("gpt-2", merges)
    assert [joined.token_bytes(i) for i in joined.encode("12")] == [b"12"]
    apart = byte_tokenizer("smollm", merges)
    assert [apart.token_bytes(i) for i in apart.encode("12")] == [b"1", b"2"]


def test_the_byte_alphabet_is_one_to_one() -> None:
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert alphabet["Ġ"] == 0x20 and alphabet["Ċ"] == 0x0A and alphabet["a"] == 0x61


def test_the_begin_token_is_added_once() -> None:
    tokenizer = byte_tokenizer(bos_id=0, add_bos=True)
    assert tokenizer.encode("") == [0]
    assert tokenizer.encode("<|end|>") == [0]
    assert tokenizer.encode("a")[0] == 0 and len(tokenizer.encode("a")) == 2


def test_the_builtin_chat_prompt_opens_the_assistants_turn() -> None:
    prompt = BUILTIN.render_chat([{"role": "user", "content": "Hi"}])
    assert prompt == "<|begin|>user\nHi<|end|>\n<|begin|>assistant\n"
    assert BUILTIN.encode(prompt).count(0) == 2  # control tokens are taken as such


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{{ raise_exception('system comes first') }}", "messages: system comes first"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
    ],
)
def test_a_template_can_refuse_but_not_reach_out(template: str, complaint: str) -> None:
    with pytest.raises(ModelFileError, match=complaint):
        byte_tokenizer(chat_template=template).render_chat([{"role": "user", "content": "x"}])


def test_a_broken_template_and_a_missing_one_are_named() -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer\.chat_template: .*; accepted: a jinja2 template"):
        byte_tokenizer(chat_template="{% for %}")
    with pytest.raises(ModelFileError, match="chat template: missing"):
        byte_tokenizer().render_chat([])


def test_end_tokens_are_the_named_one_and_known_control_tokens() -> None:
    tokens = ["<|endoftext|>", "<|im_end|>", "x", "</s>"]
    assert find_end_tokens(tokens, {0, 1}, [2, 1]) == (2, 1, 0)
    assert find_end_tokens(tokens, {0, 1}, ()) == (0, 1)  # "</s>" is plain text here, not a control token
