"""Byte-level BPE from GGUF metadata, chat templates, and text that grows token by token. No torch here."""

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as BpeTokenizer
from tokenizers.models import BPE

from sloscope.errors import ModelFileError


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    # Every digit is a word of its own, cut before the GPT-2 pattern sees the rest.
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


# How text is cut into words before the merges, by the name that llama.cpp gives it (tokenizer.ggml.pre).
PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {"gpt-2": _gpt2, "smollm": _smollm}

# Control tokens that end an answer whatever the metadata names as the one end token: a chat model may close a
# raw completion with the end-of-text of its pretraining.
_END_TOKENS = frozenset({"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end|>", "</s>"})


def find_end_tokens(tokens: Sequence[str], control_ids: Iterable[int], declared: Iterable[int]) -> tuple[int, ...]:
    """The declared ones, in their order, since a chat template means the first; then those that are known by name."""
    named = sorted(i for i in control_ids if tokens[i] in _END_TOKENS)
    return tuple(dict.fromkeys([*declared, *named]))


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: character -> byte.

    Printable Latin-1 bytes stand for themselves, the other 68 are counted up from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


_BYTE_OF = byte_alphabet()


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """All that a tokenizer is made of; plain data, so that it crosses to another process."""

    tokens: tuple[str, ...]  # in the byte alphabet; control tokens literal
    merges: tuple[str, ...]  # "left right"
    control_ids: frozenset[int]
    pre: str
    bos_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool
    chat_template: str | None

    def check(self, source: str) -> None:
        """Raise ModelFileError unless a tokenizer can be made of it."""
        if self.pre not in PRE_TOKENIZERS:
            accepted = ", ".join(sorted(PRE_TOKENIZERS))
            raise ModelFileError(f"{source}: tokenizer.ggml.pre: {self.pre!r}; accepted: {accepted}")
        for name, token_id in [("bos_token_id", self.bos_id), *(("eos_token_id", i) for i in self.eos_ids)]:
            if token_id is not None and not 0 <= token_id < len(self.tokens):
                raise ModelFileError(
                    f"{source}: tokenizer.ggml.{name}: {token_id}; accepted: 0 to {len(self.tokens) - 1}"
                )
        if self.add_bos and self.bos_id is None:
            raise ModelFileError(f"{source}: tokenizer.ggml.bos_token_id: missing; accepted: the token to add")


class Tokenizer:
    def __init__(self, spec: TokenizerSpec) -> None:
        self.spec = spec
        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in spec.merges)]
        vocab = {token: i for i, token in enumerate(spec.tokens)}
        self._bpe = BpeTokenizer(BPE(vocab=vocab, merges=pairs, fuse_unk=False))
        self._bpe.pre_tokenizer = PRE_TOKENIZERS[spec.pre]()
        self._bpe.add_special_tokens(
            [AddedToken(spec.tokens[i], special=True, normalized=False) for i in sorted(spec.control_ids)]
        )
        self._bytes = [b"" if i in spec.control_ids else _token_bytes(token) for i, token in enumerate(spec.tokens)]
        self.longest_token = max(len(token) for token in spec.tokens)  # characters, of which text has no more per token
        self._template = _compile(spec.chat_template)

    def encode(self, text: str) -> list[int]:
        """Control tokens written out in the text are taken as such, as chat templates need."""
        ids: list[int] = self._bpe.encode(text, add_special_tokens=False).ids
        bos = self.spec.bos_id
        # A chat template may have written the token already.
        return [bos, *ids] if self.spec.add_bos and bos is not None and ids[:1] != [bos] else ids

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 of a token, which may begin or end inside a character; empty for control tokens."""
        return self._bytes[token_id]

    def decode(self, token_ids: Iterable[int]) -> str:
        """Control tokens leave nothing; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self._bytes[i] for i in token_ids).decode("utf-8", errors="replace")

    def text_stream(self, stop: Sequence[str] = ()) -> "TextStream":
        return TextStream(self._bytes, stop)

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt that asks for the assistant's answer. ModelFileError if the template refuses."""
        if self._template is None:
            raise ModelFileError("chat template: missing in this model; accepted: completions without a chat")
        spec = self.spec
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=True,
                bos_token="" if spec.bos_id is None else spec.tokens[spec.bos_id],
                eos_token=spec.tokens[spec.eos_ids[0]] if spec.eos_ids else "",
                raise_exception=_refuse,
            )
        except (TemplateError, TypeError) as error:
            raise ModelFileError(f"messages: {error}; accepted: what the model's chat template knows") from error


def _token_bytes(token: str) -> bytes:
    """Tokens outside the byte alphabet (added by hand, not by the merges) stand for their own text."""
    if all(character in _BYTE_OF for character in token):
        return bytes(_BYTE_OF[character] for character in token)
    return token.encode()


def _compile(template: str | None) -> Any:
    # The template comes with the model, from anyone: sandboxed, and it cannot change the messages.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    if template is None:
        return None
    try:
        return environment.from_string(template)
    except TemplateError as error:
        raise ModelFileError(f"tokenizer.chat_template: {error}; accepted: a jinja2 template") from error


def _refuse(message: str) -> None:
    raise TemplateError(message)


class TextStream:
    """Text of one answer as its tokens come.

    Bytes of an unfinished character are held back, and so is text that may turn out to begin a stop string. Text
    before a stop string is kept, the stop string and what follows are not.
    """

    def __init__(self, token_bytes: Sequence[bytes], stop: Sequence[str] = ()) -> None:
        assert all(stop), "an empty stop string would end every answer before it begins"
        self._token_bytes = token_bytes
        self._stop = tuple(stop)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, token_id: int) -> str:
        """Text that is safe to send after this token; often "" for a moment."""
        assert self.stopped_by is None, "the answer has ended"
        return self._advance(self._utf8.decode(self._token_bytes[token_id]))

    def finish(self) -> str:
        """What was held back, at the end of the answer. Half a character becomes U+FFFD."""
        if self.stopped_by is not None:
            return ""
        text = self._advance(self._utf8.decode(b"", final=True))
        if self.stopped_by is None:
            text, self._held = text + self._held, ""
        return text

    def _advance(self, new: str) -> str:
        self._held += new
        found = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.stopped_by = min(found)
            text, self._held = self._held[:at], ""
            return text
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of text that begins stop without completing it."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
