"""A TokenizerSpec from tokenizer.json and the files beside it. What a spec cannot say is refused by name.

tokenizer.json             vocabulary, merges, control tokens, how text is cut
tokenizer_config.json      optional: the begin token, a chat template
chat_template.jinja        optional: the chat template, before the one above
generation_config.json     optional: tokens that end an answer, before config.json
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reference_server.tokenizer import TokenizerSpec, find_end_tokens
from reference_server.weights import Fields
from sloscope.errors import ModelFileError

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_DIGITS = {"type": "Digits", "individual_digits": True}
# tokenizer.json's pre-tokenizer -> our name of it; `trim_offsets` is about offsets, not about tokens.
_PRE_TOKENIZERS = [
    (_BYTE_LEVEL, "gpt-2"),
    ({"type": "Sequence", "pretokenizers": [_BYTE_LEVEL]}, "gpt-2"),
    ({"type": "Sequence", "pretokenizers": [_DIGITS, _BYTE_LEVEL]}, "smollm"),
]
# Settings of the BPE model that would change tokens, and the value that does not.
_PLAIN_BPE = {
    "dropout": (None, 0.0),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
    "byte_fallback": (None, False),
    "ignore_merges": (None, False),
}


def read_json(path: Path) -> Fields:
    """A file that holds one JSON object."""
    if not path.is_file():
        raise ModelFileError(f"{path}: no such file; accepted: a model directory in Hugging Face's layout")
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:  # UnicodeDecodeError is a ValueError
        raise ModelFileError(f"{path}: damaged JSON ({error}); accepted: an object") from error
    if not isinstance(values, dict):
        raise ModelFileError(f"{path}: {type(values).__name__}; accepted: an object")
    return Fields(str(path), values)


def _read_optional(path: Path) -> Fields:
    return read_json(path) if path.exists() else Fields(str(path), {})


def read_tokenizer_spec(directory: Path, config: Fields, vocab: int) -> TokenizerSpec:
    """`config` is config.json, `vocab` the rows of the embedding."""
    fields = read_json(directory / "tokenizer.json")
    try:
        return _read_spec(directory, fields, config, vocab)
    except (AttributeError, KeyError, TypeError, IndexError, ValueError) as error:  # a part of another shape
        raise ModelFileError(f"{fields.source}: {error}; accepted: what the tokenizers library writes") from error


def _read_spec(directory: Path, fields: Fields, config: Fields, vocab: int) -> TokenizerSpec:
    settings = _read_optional(directory / "tokenizer_config.json")
    model = Fields(f"{fields.source}: model", fields.need("model", dict))
    pre = _check_plain(fields, model)
    ids = dict(model.need("vocab", dict))
    control_ids = _control_tokens(fields, ids)
    tokens = _token_list(fields, config, ids, vocab)
    bos_id = _bos_id(settings, config, ids)
    return TokenizerSpec(
        tokens=tokens,
        merges=_merges(model, ids),
        control_ids=control_ids,
        pre=pre,
        bos_id=bos_id,
        eos_ids=_eos_ids(directory, config, tokens, control_ids),
        add_bos=_adds_bos(fields, settings, ids, bos_id),
        chat_template=_chat_template(directory, settings),
    )


def _check_plain(fields: Fields, model: Fields) -> str:
    """The name of the pre-tokenizer, once everything else is byte-level BPE as ours does it."""
    if model.get("type", "BPE") != "BPE":
        raise model.error("type", "'BPE'")
    for key, plain in _PLAIN_BPE.items():
        if model.get(key) not in plain:
            raise model.error(key, repr(plain[-1]))
    if fields.get("normalizer") is not None:
        raise fields.error("normalizer", "null")
    pre = next(
        (name for known, name in _PRE_TOKENIZERS if _without_offsets(fields.get("pre_tokenizer")) == known), None
    )
    if pre is None:
        raise fields.error("pre_tokenizer", "ByteLevel as in GPT-2, alone or after Digits one by one")
    if (fields.get("decoder") or {}).get("type") != "ByteLevel":
        raise fields.error("decoder", "ByteLevel")
    return pre


def _without_offsets(part: Any) -> Any:
    if isinstance(part, list):
        return [_without_offsets(each) for each in part]
    if isinstance(part, dict):
        return {key: _without_offsets(value) for key, value in part.items() if key != "trim_offsets"}
    return part


def _control_tokens(fields: Fields, ids: dict[str, int]) -> frozenset[int]:
    """Ids of the special tokens; those that the vocabulary lacks are added to it."""
    control = set()
    for added in fields.get("added_tokens", []):
        content = added.get("content")
        where = f"{fields.source}: added_tokens: {content!r:.40}"
        if not added.get("special"):
            raise ModelFileError(f"{where}: special false; accepted: special tokens only")
        for key in ("lstrip", "rstrip", "single_word"):
            if added.get(key):
                raise ModelFileError(f"{where}: {key} true; accepted: false")
        if ids.setdefault(content, added.get("id")) != added.get("id"):
            raise ModelFileError(f"{where}: id {added.get('id')}; accepted: {ids[content]}, as in the vocabulary")
        control.add(ids[content])
    return frozenset(control)


def _token_list(fields: Fields, config: Fields, ids: Mapping[str, int], vocab: int) -> tuple[str, ...]:
    """One name for every row of the embedding. Rows beyond the vocabulary get a name that no text leads to."""
    for token, token_id in ids.items():
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise ModelFileError(f"{fields.source}: id of {token!r:.40}: {token_id!r:.40}; accepted: 0 and above")
    by_id = {token_id: token for token, token_id in ids.items()}
    if len(by_id) != len(ids):
        raise ModelFileError(f"{fields.source}: vocab: two tokens with one id; accepted: an id for each")
    if ids and max(by_id) >= vocab:
        raise config.error("vocab_size", f"{max(by_id) + 1} and more, for the ids of {fields.source}")
    return tuple(by_id.get(i, f"[PAD{i}]") for i in range(vocab))


def _merges(model: Fields, ids: Mapping[str, int]) -> tuple[str, ...]:
    merges = []
    for merge in model.need("merges", list):
        left, _, right = merge.partition(" ") if isinstance(merge, str) else (merge[0], " ", merge[-1])
        if left not in ids or right not in ids or left + right not in ids or " " in left + right:
            raise ModelFileError(f"{model.source}.merges: {merge!r:.60}; accepted: two tokens that make a third")
        merges.append(f"{left} {right}")
    return tuple(merges)


def _content(token: Any) -> Any:
    """tokenizer_config.json names a token by its text, or by an object that holds it."""
    return token.get("content") if isinstance(token, dict) else token


def _bos_id(settings: Fields, config: Fields, ids: Mapping[str, int]) -> int | None:
    name = _content(settings.get("bos_token"))
    if name is not None:
        if name not in ids:
            raise settings.error("bos_token", "a token of the vocabulary")
        return ids[name]
    bos_id: int | None = config.get("bos_token_id")
    if bos_id is not None and bos_id not in ids.values():
        raise config.error("bos_token_id", "an id of the vocabulary")
    return bos_id


def _eos_ids(directory: Path, config: Fields, tokens: tuple[str, ...], control_ids: frozenset[int]) -> tuple[int, ...]:
    generation = _read_optional(directory / "generation_config.json")
    source = generation if generation.get("eos_token_id") is not None else config
    named = source.get("eos_token_id", [])
    named = named if isinstance(named, list) else [named]
    if not all(isinstance(i, int) and 0 <= i < len(tokens) for i in named):
        raise source.error("eos_token_id", f"0 to {len(tokens) - 1}, one or a list")
    return find_end_tokens(tokens, control_ids, named)


def _adds_bos(fields: Fields, settings: Fields, ids: Mapping[str, int], bos_id: int | None) -> bool:
    """Whether the post-processor puts the begin token first. Anything else that it might add is refused."""
    processor = fields.get("post_processor") or {"type": "ByteLevel"}
    parts = processor.get("processors", []) if processor.get("type") == "Sequence" else [processor]
    added: list[Any] = []
    for part in parts:
        if part.get("type") == "TemplateProcessing":
            added += part.get("single", [])
        elif part.get("type") != "ByteLevel":  # that one is about offsets
            raise fields.error("post_processor", "ByteLevel or TemplateProcessing")
    names = [piece["SpecialToken"]["id"] if "SpecialToken" in piece else "" for piece in added]  # "": the text
    begins = len(names) == 2 and names[1] == "" and ids.get(names[0]) == bos_id is not None
    if names not in ([], [""]) and not begins:
        raise fields.error("post_processor", "a template that adds nothing, or the begin token before the text")
    for key, done in (("add_bos_token", begins), ("add_eos_token", False)):
        if settings.get(key, done) != done:
            raise settings.error(key, f"{str(done).lower()}, as the post-processor of tokenizer.json does")
    return begins


def _chat_template(directory: Path, settings: Fields) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except ValueError as error:
            raise ModelFileError(f"{path}: {error}; accepted: UTF-8") from error
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name
        template = next((each.get("template") for each in template if each.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        raise settings.error("chat_template", "a jinja2 template")
    return template
