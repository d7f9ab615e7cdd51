"""Weights and tokenizer of a Llama-family model from a GGUF file, under their Hugging Face names."""

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import torch

from reference_server.model import tensor_shapes
from reference_server.model_config import ModelConfig
from reference_server.tokenizer import TokenizerSpec, find_end_tokens
from reference_server.weights import Checkpoint, Fields
from sloscope.errors import ModelFileError

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PER_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
# llama.cpp's token_type values.
_CONTROL_TOKEN = 3


def read_gguf(path: Path, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """Dequantize the whole file. Raises ModelFileError for anything but a complete Llama model."""
    reader, metadata = _open(path)
    if metadata.get("general.architecture") != "llama":
        raise metadata.error("general.architecture", "'llama'")
    tokenizer = read_tokenizer_spec(metadata)
    infos = {info.name: info for info in reader.tensors}
    config = _read_config(metadata, tokenizer, tie_embeddings="output.weight" not in infos)

    shapes = tensor_shapes(config)
    names = dict(_tensor_names(config))
    for name in names:
        if name not in infos:
            raise ModelFileError(f"{path}: tensor {name}: missing; accepted: all {len(names)} of a Llama model")
    for name in infos:
        # A tensor that is left out (a bias, an expert, rope factors) would change the output without a word.
        if name not in names:
            raise ModelFileError(f"{path}: tensor {name}: not known; accepted: plain Llama without extras")

    state = {}
    for name, target in names.items():
        array = _dequantize(path, infos[name])
        if array.shape != shapes[target]:
            raise ModelFileError(f"{path}: tensor {name}: shape {array.shape}; accepted: {shapes[target]}")
        if name.endswith("attn_q.weight"):
            array = unpermute(array, config.heads)
        elif name.endswith("attn_k.weight"):
            array = unpermute(array, config.kv_heads)
        # F32 tensors come as a read-only view of the file: copied, so that the file can go.
        state[target] = torch.from_numpy(np.array(array, dtype=np.float32)).to(dtype)
    return Checkpoint(config, state, tokenizer)


def _open(path: Path) -> tuple[gguf.GGUFReader, Fields]:
    if not path.is_file():
        raise ModelFileError(f"model {str(path)!r}: no such file; accepted: builtin, smollm2 or a GGUF file")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelFileError(f"{path}: first bytes {magic!r}: not a GGUF file; accepted: b'GGUF'")
    try:
        reader = gguf.GGUFReader(path)
        return reader, Fields(str(path), {key: field.contents() for key, field in reader.fields.items()})
    except Exception as error:  # the parser meets a damaged file with whatever numpy raises
        raise ModelFileError(f"{path}: damaged or truncated GGUF file ({error}); accepted: a whole one") from error


def _dequantize(path: Path, info: gguf.ReaderTensor) -> np.ndarray:
    try:
        return gguf.dequantize(info.data, info.tensor_type)
    except NotImplementedError as error:
        raise ModelFileError(
            f"{path}: tensor {info.name}: type {info.tensor_type.name}; accepted: what gguf.dequantize knows"
        ) from error


def _read_config(metadata: Fields, tokenizer: TokenizerSpec, tie_embeddings: bool) -> ModelConfig:
    if metadata.get("llama.rope.scaling.type", "none") != "none":
        raise metadata.error("llama.rope.scaling.type", "'none'")
    hidden, heads = metadata.positive("llama.embedding_length"), metadata.positive("llama.attention.head_count")
    kv_heads = metadata.get("llama.attention.head_count_kv", heads)
    if not isinstance(kv_heads, int) or kv_heads < 1 or heads % kv_heads:
        raise metadata.error("llama.attention.head_count_kv", f"a divisor of {heads}")
    head_dim = metadata.positive("llama.attention.key_length", default=hidden // heads)
    if head_dim % 2 or metadata.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise metadata.error("llama.rope.dimension_count", f"the even head size {head_dim}")
    return ModelConfig(
        layers=metadata.positive("llama.block_count"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=metadata.positive("llama.feed_forward_length"),
        vocab=len(tokenizer.tokens),
        rope_theta=float(metadata.get("llama.rope.freq_base", 10000.0)),
        norm_eps=metadata.need("llama.attention.layer_norm_rms_epsilon", float),
        tie_embeddings=tie_embeddings,
        max_context=metadata.positive("llama.context_length"),
        bos_id=tokenizer.bos_id,
        eos_ids=tokenizer.eos_ids,
    )


def read_tokenizer_spec(metadata: Fields) -> TokenizerSpec:
    if metadata.get("tokenizer.ggml.model") != "gpt2":
        raise metadata.error("tokenizer.ggml.model", "'gpt2' (byte-level BPE)")
    tokens: list[str] = metadata.need("tokenizer.ggml.tokens", list)
    types: list[int] = metadata.get("tokenizer.ggml.token_type", [])
    control_ids = frozenset(i for i, kind in enumerate(types) if kind == _CONTROL_TOKEN)
    eos_id = metadata.get("tokenizer.ggml.eos_token_id")
    spec = TokenizerSpec(
        tokens=tuple(tokens),
        merges=tuple(metadata.need("tokenizer.ggml.merges", list)),
        control_ids=control_ids,
        pre=metadata.get("tokenizer.ggml.pre", "gpt-2"),
        bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_ids=find_end_tokens(tokens, control_ids, () if eos_id is None else (eos_id,)),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        chat_template=metadata.get("tokenizer.chat_template"),
    )
    spec.check(metadata.source)
    return spec


def _tensor_names(config: ModelConfig) -> Iterator[tuple[str, str]]:
    for source, target in _TOP_LEVEL.items():
        if not (config.tie_embeddings and target == "lm_head.weight"):
            yield source, target
    for i in range(config.layers):
        for source, target in _PER_LAYER.items():
            yield f"blk.{i}.{source}", f"model.layers.{i}.{target}"


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's order of the rows of q and k.

    llama.cpp rotates neighbours (0, 1), (2, 3), …; Hugging Face rotates halves (0, n/2), (1, n/2 + 1), …. Row 2i + j
    of a head in the file is row i + j * n/2 here.
    """
    rows, columns = weight.shape
    pairs = rows // heads // 2
    return weight.reshape(heads, pairs, 2, columns).swapaxes(1, 2).reshape(rows, columns)
