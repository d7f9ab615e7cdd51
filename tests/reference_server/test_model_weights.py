"""Reading GGUF: the tensors of a whole file arrive unchanged, and each kind of bad file gets one clear line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from reference_server.builtin import make_builtin, random_state
from reference_server.gguf_weights import read_gguf
from reference_server.model_config import ModelConfig
from reference_server.tokenizer import Tokenizer, TokenizerSpec
from sloscope.errors import ModelFileError

SPEC = make_builtin().tokenizer
CONFIG = ModelConfig(
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=96,
    vocab=len(SPEC.tokens),
    rope_theta=500.0,
    norm_eps=1e-6,
    tie_embeddings=False,
    max_context=128,
    bos_id=0,
    eos_ids=(1,),
)
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest.removesuffix('.weight')]}.weight"


def interleave_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order: of each head, row i of the first half, then row i of the second half."""
    out = []
    for head in np.split(weight, heads):
        first, second = np.split(head, 2)
        for a, b in zip(first, second, strict=True):
            out += [a, b]
    return np.stack(out)


def write_gguf(
    path: Path,
    change: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None,
    architecture: str = "llama",
    quantize: gguf.GGMLQuantizationType | None = None,
    tie_embeddings: bool = False,
    **metadata: Any,
) -> None:
    tensors = {}
    for name, tensor in random_state(CONFIG, seed=9).items():
        array = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            array = interleave_halves(array, CONFIG.heads if "q_proj" in name else CONFIG.kv_heads)
        tensors[gguf_name(name)] = array
    if tie_embeddings:
        del tensors["output.weight"]
    change(tensors)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(CONFIG.layers)
    writer.add_context_length(CONFIG.max_context)
    writer.add_embedding_length(CONFIG.hidden)
    writer.add_feed_forward_length(CONFIG.intermediate)
    writer.add_head_count(CONFIG.heads)
    writer.add_head_count_kv(metadata.get("kv_heads", CONFIG.kv_heads))
    writer.add_rope_freq_base(CONFIG.rope_theta)
    if "rope_scaling" in metadata:
        writer.add_rope_scaling_type(metadata["rope_scaling"])
    if metadata.get("norm_eps", True):
        writer.add_layer_norm_rms_eps(CONFIG.norm_eps)
    writer.add_tokenizer_model(metadata.get("tokenizer", "gpt2"))
    writer.add_tokenizer_pre(metadata.get("pre", SPEC.pre))
    writer.add_token_list(list(SPEC.tokens))
    writer.add_token_types([3 if i in SPEC.control_ids else 1 for i in range(len(SPEC.tokens))])
    writer.add_token_merges(list(SPEC.merges))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(metadata.get("eos_id", 1))
    writer.add_chat_template(str(SPEC.chat_template))
    for name, array in tensors.items():
        if quantize is not None and array.ndim == 2:
            writer.add_tensor(name, gguf.quantize(array, quantize), raw_dtype=quantize)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_whole_file_gives_the_config_tensors_and_tokenizer_back(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    checkpoint = read_gguf(tmp_path / "model.gguf")
    # The file stores the norm's epsilon as float32.
    assert checkpoint.config.norm_eps == pytest.approx(1e-6, rel=1e-6)
    assert checkpoint.config == ModelConfig(
        **{f: getattr(CONFIG, f) for f in ModelConfig.__slots__} | {"norm_eps": checkpoint.config.norm_eps}
    )
    expected = random_state(CONFIG, seed=9)
    assert checkpoint.state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.state[name], tensor), name
    read: TokenizerSpec = checkpoint.tokenizer
    assert (read.tokens, read.merges, read.chat_template) == (SPEC.tokens, SPEC.merges, SPEC.chat_template)
    assert Tokenizer(read).encode("the river") == Tokenizer(SPEC).encode("the river")


def test_tied_embeddings_are_a_file_without_an_output_tensor(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", tie_embeddings=True)
    checkpoint = read_gguf(tmp_path / "model.gguf")
    assert checkpoint.config.tie_embeddings and "lm_head.weight" not in checkpoint.state


def test_quantized_tensors_are_dequantized(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", quantize=gguf.GGMLQuantizationType.Q8_0)
    checkpoint = read_gguf(tmp_path / "model.gguf", torch.bfloat16)
    name = "model.layers.1.self_attn.k_proj.weight"
    assert checkpoint.state[name].dtype == torch.bfloat16
    # Q8_0 keeps 1/127 of the largest of 32 values (about 3 / 8 here); bfloat16 1/256 of the value.
    torch.testing.assert_close(checkpoint.state[name].float(), random_state(CONFIG, seed=9)[name], atol=0.005, rtol=0)


def drop(name: str) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda tensors: tensors.__delitem__(name)


def put(name: str, shape: tuple[int, ...]) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda tensors: tensors.update({name: np.zeros(shape, dtype=np.float32)})


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"architecture": "qwen2"}, r"general\.architecture: 'qwen2'; accepted: 'llama'"),
        ({"change": drop("blk.1.ffn_up.weight")}, r"tensor blk\.1\.ffn_up\.weight: missing; accepted: all 21 "),
        ({"change": put("blk.0.attn_q.bias", (64,))}, r"tensor blk\.0\.attn_q\.bias: not known; accepted: "),
        ({"change": put("output.weight", (3, 64))}, r"tensor output\.weight: shape \(3, 64\); accepted: "),
        ({"kv_heads": 3}, r"llama\.attention\.head_count_kv: 3; accepted: a divisor of 4"),
        ({"norm_eps": False}, r"llama\.attention\.layer_norm_rms_epsilon: missing; accepted: float"),
        ({"rope_scaling": gguf.RopeScalingType.YARN}, r"llama\.rope\.scaling\.type: 'yarn'; accepted: 'none'"),
        ({"tokenizer": "llama"}, r"tokenizer\.ggml\.model: 'llama'; accepted: 'gpt2'"),
        ({"pre": "qwen2"}, r"tokenizer\.ggml\.pre: 'qwen2'; accepted: gpt-2, smollm"),
        ({"eos_id": 99_999}, r"tokenizer\.ggml\.eos_token_id: 99999; accepted: 0 to \d+$"),
    ],
)
def test_what_is_not_a_plain_llama_is_refused_by_field(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, **changes)
    with pytest.raises(ModelFileError, match=complaint) as raised:
        read_gguf(path)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


def test_a_missing_file_and_one_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"nowhere\.gguf': no such file; accepted: builtin, smollm2 or a GGUF"):
        read_gguf(tmp_path / "nowhere.gguf")
    other = tmp_path / "model.gguf"
    other.write_bytes(b"PK\x03\x04 a zip")
    with pytest.raises(ModelFileError, match=r"first bytes b'PK\\x03\\x04': not a GGUF file; accepted: b'GGUF'"):
        read_gguf(other)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.3, 0.7, 0.999])
def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path, share: float) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: 4 + int(share * len(whole))])
    with pytest.raises(ModelFileError, match="damaged or truncated GGUF file"):
        read_gguf(path)
