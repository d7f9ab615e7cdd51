"""Directories in Hugging Face's layout, written by transformers: the same logits, the same tokens, clear refusals."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from tokenizers import AddedToken, decoders, pre_tokenizers, processors
from tokenizers import Tokenizer as BpeTokenizer
from tokenizers.models import BPE
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from reference_server.builtin import make_builtin
from reference_server.model import Llama
from reference_server.safetensors_weights import read_safetensors
from reference_server.tokenizer import Tokenizer
from sloscope.errors import ModelFileError
from tests.reference_server.serving import Served

SPEC = make_builtin().tokenizer
TEXTS = ["the river  42", "naïve — 日本語 😀\n\n", "<|begin|>user\nhi<|end|>", "", "   a  1 2"]
# Both sides compute in float32 in another order of additions; logits are of size 1.
TOLERANCE = 1e-4


def write_tokenizer(directory: Path, digits: bool = False, begin: bool = False) -> None:
    vocabulary = {token: i for i, token in enumerate(SPEC.tokens)}
    bpe = BpeTokenizer(BPE(vocab=vocabulary, merges=[tuple(merge.split(" ")) for merge in SPEC.merges]))
    bpe.add_special_tokens([AddedToken(SPEC.tokens[i], special=True) for i in sorted(SPEC.control_ids)])
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    each_digit = pre_tokenizers.Digits(individual_digits=True)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([each_digit, byte_level]) if digits else byte_level
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.ByteLevel(trim_offsets=False)
    if begin:
        bpe.post_processor = processors.TemplateProcessing("<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<|begin|>", eos_token="<|end|>")
    tokenizer.chat_template = SPEC.chat_template
    tokenizer.save_pretrained(directory)


def write_model(directory: Path, tie: bool = False, vocab: int = len(SPEC.tokens), **saved: Any) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,  # 4 * 24 = 96: the attention is wider than the hidden state
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 700.0},
        tie_word_embeddings=tie,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(3)
    model = LlamaForCausalLM(config).eval().to(saved.pop("dtype", torch.float32))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # norms other than 1, so that a norm left out shows
                parameter.copy_(torch.linspace(0.5, 1.5, 64))
    model.save_pretrained(directory, **saved)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    write_model(path)
    write_tokenizer(path)
    return path


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(saved, tmp_path / "tiny-llama"))


def our_logits(directory: Path, token_ids: list[int]) -> Tensor:  # [tokens, vocab]
    checkpoint = read_safetensors(directory)
    model = Llama(checkpoint.config, checkpoint.state, torch.float32, torch.device("cpu"))

    def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:  # one sequence, whole
        k, v = kv.chunk(2, dim=1)
        heads_first = (each.transpose(0, 1).unsqueeze(0) for each in (q, k, v))
        out = functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1).reshape(len(token_ids), -1)

    positions = torch.arange(len(token_ids))
    with torch.inference_mode():
        return model.forward(torch.tensor(token_ids), positions, positions, attend)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shard_size", ["1GB", "60KB"])
def test_what_transformers_saves_gives_the_logits_of_transformers(
    tmp_path: Path, tie: bool, dtype: torch.dtype, shard_size: str
) -> None:
    write_model(tmp_path, tie, dtype=dtype, max_shard_size=shard_size)
    write_tokenizer(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 or shard_size == "60KB"
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "60KB")
    token_ids = torch.randint(0, len(SPEC.tokens), (40,), generator=torch.Generator().manual_seed(1)).tolist()
    oracle = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        expected = oracle(torch.tensor([token_ids])).logits[0]
    assert expected.std() > 0.5
    torch.testing.assert_close(our_logits(tmp_path, token_ids), expected, atol=TOLERANCE, rtol=0)


def test_tensors_come_in_the_dtype_asked_for_and_outlive_their_file(directory: Path) -> None:
    path = directory / "model.safetensors"
    expected = load(path.read_bytes())
    checkpoint = read_safetensors(directory, torch.bfloat16)
    same = read_safetensors(directory)
    with path.open("r+b") as file:  # in place: views of the file would be zero now
        file.write(bytes(path.stat().st_size))
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.state[name], tensor.bfloat16()) and torch.equal(same.state[name], tensor)


@pytest.mark.parametrize(("digits", "begin"), [(False, False), (True, False), (False, True)])
def test_tokens_text_and_chat_prompts_are_those_of_transformers(tmp_path: Path, digits: bool, begin: bool) -> None:
    write_model(tmp_path)
    write_tokenizer(tmp_path, digits, begin)
    oracle = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    spec = read_safetensors(tmp_path).tokenizer
    assert (spec.pre, spec.add_bos) == ("smollm" if digits else "gpt-2", begin)
    assert (spec.bos_id, spec.eos_ids, spec.control_ids) == (0, (1,), {0, 1})
    tokenizer = Tokenizer(spec)
    for text in TEXTS:
        # A text that opens with the begin token gets no second one here, as chat templates write it themselves.
        if not (begin and text.startswith("<|begin|>")):
            assert tokenizer.encode(text) == oracle.encode(text), text
    messages = [{"role": "user", "content": "Hi"}]
    expected = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.render_chat(messages) == expected


def test_ends_and_templates_are_found_where_checkpoints_keep_them(directory: Path) -> None:
    # Beside the named ones "<|end|>", id 1, ends an answer by its name; a template's
    # eos_token is the first that was declared.
    edit(directory / "generation_config.json", {"eos_token_id": [5, 9]})
    (directory / "chat_template.jinja").unlink()
    templates = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    edit(directory / "tokenizer_config.json", {"chat_template": templates, "bos_token": {"content": "<|end|>"}})
    spec = read_safetensors(directory).tokenizer
    assert (spec.eos_ids, spec.chat_template, spec.bos_id) == ((5, 9, 1), "yes", 1)
    # Without those files config.json speaks.
    (directory / "generation_config.json").unlink()
    (directory / "tokenizer_config.json").unlink()
    edit(directory / "config.json", {"eos_token_id": 7})
    spec = read_safetensors(directory).tokenizer
    assert (spec.eos_ids, spec.chat_template, spec.bos_id) == ((7, 1), None, 0)


def test_rows_beyond_the_vocabulary_get_tokens_that_no_text_leads_to(tmp_path: Path) -> None:
    rows = len(SPEC.tokens) + 3
    write_model(tmp_path, vocab=rows)
    write_tokenizer(tmp_path)
    checkpoint = read_safetensors(tmp_path)
    assert len(checkpoint.tokenizer.tokens) == checkpoint.config.vocab == rows
    tokenizer = Tokenizer(checkpoint.tokenizer)
    assert rows - 1 not in tokenizer.encode(checkpoint.tokenizer.tokens[-1])
    assert tokenizer.decode([rows - 1]) == f"[PAD{rows - 1}]"


def test_older_configs_keep_theta_beside_the_scaling(directory: Path) -> None:
    edit(directory / "config.json", {"rope_parameters": None, "rope_scaling": None, "rope_theta": 9000})
    assert read_safetensors(directory).config.rope_theta == 9000.0


def test_tables_of_older_checkpoints_and_a_head_equal_to_the_embedding_are_no_extras(tmp_path: Path) -> None:
    write_model(tmp_path, tie=True)
    write_tokenizer(tmp_path)
    table = torch.ones(12)
    edit_tensors(tmp_path, lambda state: state.update({"model.layers.0.self_attn.rotary_emb.inv_freq": table}))
    edit_tensors(tmp_path, lambda state: state.update({"lm_head.weight": state["model.embed_tokens.weight"].clone()}))
    assert "lm_head.weight" not in read_safetensors(tmp_path).state
    edit_tensors(tmp_path, lambda state: state.update({"lm_head.weight": state["lm_head.weight"] + 1}))
    with pytest.raises(ModelFileError, match=r"tensor lm_head\.weight: differs from the embedding; accepted: the same"):
        read_safetensors(tmp_path)


def edit(path: Path, changes: dict[str, Any]) -> None:
    values = json.loads(path.read_text())
    for key, value in changes.items():
        *parents, last = key.split(".")
        at = values
        for parent in parents:
            at = at[parent]
        if value is ...:
            del at[last]
        else:
            at[last] = value
    path.write_text(json.dumps(values))


def edit_tensors(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    path = directory / "model.safetensors"
    state = load(path.read_bytes())
    change(state)
    path.write_bytes(save(state))


@pytest.mark.parametrize(
    ("file", "changes", "complaint"),
    [
        ("config", {"model_type": "qwen2"}, r"model_type: 'qwen2'; accepted: 'llama'"),
        ("config", {"architectures": ["LlamaModel"]}, r"architectures: \['LlamaModel'\]; accepted: \['LlamaForCausal"),
        ("config", {"hidden_act": "gelu"}, r"hidden_act: 'gelu'; accepted: 'silu'"),
        ("config", {"attention_bias": True}, r"attention_bias: True; accepted: False"),
        (
            "config",
            {"quantization_config": {"bits": 4}},
            r"quantization_config: \{'bits': 4\}; accepted: none; tensors",
        ),
        ("config", {"hidden_size": ...}, r"hidden_size: missing; accepted: int"),
        ("config", {"hidden_size": "64"}, r"hidden_size: '64'; accepted: int"),
        ("config", {"num_hidden_layers": True}, r"num_hidden_layers: True; accepted: int"),
        ("config", {"intermediate_size": 0}, r"intermediate_size: 0; accepted: an integer above 0"),
        ("config", {"num_key_value_heads": 3}, r"num_key_value_heads: 3; accepted: a divisor of 4"),
        ("config", {"head_dim": 15}, r"head_dim: 15; accepted: an even number"),
        ("config", {"rms_norm_eps": ...}, r"rms_norm_eps: missing; accepted: float"),
        ("config", {"max_position_embeddings": ...}, r"max_position_embeddings: missing"),
        ("config", {"rope_parameters.rope_type": "llama3"}, r"rope_parameters\.rope_type: 'llama3'; accepted: 'def"),
        ("config", {"rope_scaling": {"type": "linear"}}, r"rope_scaling\.rope_type: 'linear'; accepted: 'default'"),
        ("config", {"rope_parameters.rope_theta": "big"}, r"rope_theta: 'big'; accepted: a number above 0"),
        ("config", {"vocab_size": 300}, r"vocab_size: 300; accepted: \d+ and more, for the ids of .*tokenizer\.json"),
        (
            "config",
            {"num_hidden_layers": 3},
            r"tensor model\.layers\.2\.input_layernorm\.weight: missing; accepted: all",
        ),
        ("config", {"num_hidden_layers": 1}, r"tensor model\.layers\.1\.[\w.]+: not known; accepted: plain Llama"),
        (
            "config",
            {"intermediate_size": 97},
            r"tensor model\.layers\.0\.mlp\.gate_proj\.weight: shape \(96, 64\); acc",
        ),
        ("generation_config", {"eos_token_id": 10**6}, r"eos_token_id: 1000000; accepted: 0 to \d+, one or a list"),
        ("tokenizer", {"model.type": "WordPiece"}, r"model: type: 'WordPiece'; accepted: 'BPE'"),
        ("tokenizer", {"model.byte_fallback": True}, r"model: byte_fallback: True; accepted: False"),
        ("tokenizer", {"model.ignore_merges": True}, r"model: ignore_merges: True; accepted: False"),
        ("tokenizer", {"model.merges": [["Ġ", "the"]]}, r"model\.merges: \['Ġ', 'the'\]; accepted: two tokens that"),
        ("tokenizer", {"model.vocab": None}, r"model: vocab: missing; accepted: dict"),
        ("tokenizer", {"model.vocab.a": "x"}, r"id of 'a': 'x'; accepted: 0 and above"),
        ("tokenizer", {"model.vocab.a": 67}, r"vocab: two tokens with one id; accepted: an id for each"),
        ("tokenizer", {"normalizer": {"type": "NFC"}}, r"normalizer: \{'type': 'NFC'\}; accepted: null"),
        ("tokenizer", {"pre_tokenizer": {"type": "Whitespace"}}, r"pre_tokenizer: .*Whitespace.*; accepted: ByteLevel"),
        ("tokenizer", {"pre_tokenizer.add_prefix_space": True}, r"pre_tokenizer: .*; accepted: ByteLevel as in GPT-2"),
        ("tokenizer", {"decoder": {"type": "Metaspace"}}, r"decoder: .*Metaspace.*; accepted: ByteLevel"),
        ("tokenizer", {"post_processor": {"type": "BertProcessing"}}, r"post_processor: .*Bert.*; accepted: ByteLevel"),
        ("tokenizer", {"added_tokens": [{"id": 9, "content": "x y", "special": False}]}, r"'x y': special false; acc"),
        ("tokenizer", {"added_tokens": [{"id": 0, "content": "x", "special": True, "lstrip": True}]}, r"lstrip true"),
        ("tokenizer", {"added_tokens": [7]}, r"tokenizer\.json: .*; accepted: what the tokenizers library writes"),
        ("tokenizer_config", {"bos_token": "<s>"}, r"bos_token: '<s>'; accepted: a token of the vocabulary"),
        ("tokenizer_config", {"add_bos_token": True}, r"add_bos_token: True; accepted: false, as the post-processor"),
        ("tokenizer_config", {"add_eos_token": True}, r"add_eos_token: True; accepted: false, as the post-processor"),
    ],
)
def test_what_is_not_a_plain_llama_is_refused_by_field(
    directory: Path, file: str, changes: dict[str, Any], complaint: str
) -> None:
    edit(directory / f"{file}.json", changes)
    with pytest.raises(ModelFileError, match=complaint) as raised:
        read_safetensors(directory)
    assert str(directory) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda state: state.pop("model.norm.weight"), r"tensor model\.norm\.weight: missing; accepted: all 21 "),
        (
            lambda state: state.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(96)}),
            r"q_proj\.bias: not kn",
        ),
        (lambda state: state.update({"lm_head.weight": torch.zeros(3, 64)}), r"lm_head\.weight: shape \(3, 64\); acc"),
        (
            lambda state: state.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}),
            r"model\.norm\.weight: type I8; accepted: F32, BF16, F16",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    directory: Path, change: Callable[[dict[str, Tensor]], None], complaint: str
) -> None:
    edit_tensors(directory, change)
    with pytest.raises(ModelFileError, match=complaint):
        read_safetensors(directory)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.3, 0.7, 0.999])
def test_a_file_cut_off_anywhere_is_refused(directory: Path, share: float) -> None:
    path = directory / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ModelFileError, match=r"model\.safetensors: damaged or truncated safetensors file \("):
        read_safetensors(directory)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("content", "complaint"),
    [(b"{", "damaged JSON"), (b"\xff\xfe", "damaged JSON"), (b"[1]", r"list; accepted: an object")],
)
def test_a_damaged_json_file_is_refused(directory: Path, file: str, content: bytes, complaint: str) -> None:
    (directory / file).write_bytes(content)
    with pytest.raises(ModelFileError, match=complaint) as raised:
        read_safetensors(directory)
    assert str(directory / file) in str(raised.value) and "\n" not in str(raised.value)


def test_files_that_are_missing_or_too_many_are_named(directory: Path) -> None:
    (directory / "tokenizer.json").rename(directory / "aside")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: no such file; accepted: a model directory"):
        read_safetensors(directory)
    (directory / "aside").rename(directory / "tokenizer.json")
    weights = directory / "model.safetensors"
    (directory / "more.safetensors").write_bytes(weights.read_bytes())
    with pytest.raises(ModelFileError, match=r"2 \.safetensors files and no model\.safetensors\.index\.json; accepted"):
        read_safetensors(directory)
    weights.unlink()
    (directory / "more.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"no \.safetensors file; accepted: one, or several with their index"):
        read_safetensors(directory)


def test_an_index_names_files_that_are_there_and_nowhere_else(tmp_path: Path) -> None:
    write_model(tmp_path, max_shard_size="60KB")
    write_tokenizer(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    first, second = sorted(tmp_path.glob("*.safetensors"))[:2]
    content = second.read_bytes()
    second.unlink()
    with pytest.raises(ModelFileError, match=rf"{second.name}: no such file; accepted: every file that"):
        read_safetensors(tmp_path)
    second.write_bytes(first.read_bytes())
    with pytest.raises(
        ModelFileError, match=rf"{second.name}: tensor \S+: also in {first.name}; accepted: each in one"
    ):
        read_safetensors(tmp_path)
    second.write_bytes(content)
    edit(index, {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}})
    with pytest.raises(ModelFileError, match=r"weight_map: '\.\./elsewhere\.safetensors'; accepted: \.safetensors"):
        read_safetensors(tmp_path)


def test_a_directory_serves_like_any_other_model(directory: Path, tmp_path: Path) -> None:
    oracle = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = Tokenizer(read_safetensors(directory).tokenizer)
    prompt = tokenizer.encode("the river")
    asked = torch.tensor([prompt])
    tokens = oracle.generate(asked, attention_mask=torch.ones_like(asked), max_new_tokens=12, do_sample=False)[0]
    served = Served(tmp_path, "--model", str(directory))
    try:
        answer = served.text(model="tiny-llama", max_tokens=12, temperature=0).json()
    finally:
        served.stop()
    assert answer["usage"]["completion_tokens"] >= 3
    assert answer["choices"][0]["text"] == tokenizer.decode(tokens.tolist()[len(prompt) :])
