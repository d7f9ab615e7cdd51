"""Weights of a Llama-family model from a GGUF file, under their Hugging Face names.

A source of weights is a function path -> Checkpoint; one for safetensors directories would stand beside
`read_gguf`, since names and layout after loading are already those of a Hugging Face checkpoint.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from reference_server.model import tensor_shapes
from reference_server.model_config import ModelConfig
from reference_server.tokenizer import TokenizerSpec, find_end_tokens
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


@dataclass(slots=True)
class Checkpoint:
    config: ModelConfig
    state: dict[str, Tensor]  # Hugging Face name -> tensor
    tokenizer: TokenizerSpec
    output_mask: Tensor | None = None  # [vocab], added to all logits; see sampler
    mask_eos: bool = False  # whether requests that do not say otherwise mask the end tokens


class _Metadata:
    """Key-value part of a GGUF file; a missing or unusable key is a ModelFileError that names it."""

    def __init__(self, path: Path, reader: gguf.GGUFReader) -> None:
        self.path = path
        self._fields = reader.fields

    def get(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def need(self, key: str, kind: type) -> Any:
        value = self.get(key)
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind):
            found = "missing" if value is None else f"{value!r:.40}"
            raise ModelFileError(f"{self.path}: metadata {key}: {found}; accepted: {kind.__name__}")
        return value

    def positive(self, key: str) -> int:
        value: int = self.need(key, int)
        if value < 1:
            raise ModelFileError(f"{self.path}: metadata {key}: {value}; accepted: an integer above 0")
        return value


def read_gguf(path: Path, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """Dequantize the whole file. Raises ModelFileError for anything but a complete Llama model."""
    reader = _open(path)
    metadata = _Metadata(path, reader)
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ModelFileError(f"{path}: general.architecture: {architecture!r}; accepted: 'llama'")
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


def _open(path: Path) -> gguf.GGUFReader:
    if not path.is_file():
        raise ModelFileError(f"model {str(path)!r}: no such file; accepted: builtin, smollm2 or a GGUF file")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelFileError(f"{path}: first bytes {magic!r}: not a GGUF file; accepted: b'GGUF'")
    try:
        return gguf.GGUFReader(path)
    except Exception as error:  # the parser meets a damaged file with whatever numpy raises
        raise ModelFileError(f"{path}: damaged or truncated GGUF file ({error}); accepted: a whole one") from error


def _dequantize(path: Path, info: gguf.ReaderTensor) -> np.ndarray:
    try:
        return gguf.dequantize(info.data, info.tensor_type)
    except NotImplementedError as error:
        raise ModelFileError(
            f"{path}: tensor {info.name}: type {info.tensor_type.name}; accepted: what gguf.dequantize knows"
        ) from error


def _read_config(metadata: _Metadata, tokenizer: TokenizerSpec, tie_embeddings: bool) -> ModelConfig:
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise ModelFileError(f"{metadata.path}: llama.rope.scaling.type: {scaling!r}; accepted: 'none'")
    hidden, heads = metadata.positive("llama.embedding_length"), metadata.positive("llama.attention.head_count")
    kv_heads = metadata.get("llama.attention.head_count_kv", heads)
    if not isinstance(kv_heads, int) or kv_heads < 1 or heads % kv_heads:
        raise ModelFileError(
            f"{metadata.path}: llama.attention.head_count_kv: {kv_heads}; accepted: a divisor of {heads}"
        )
    head_dim = metadata.get("llama.attention.key_length", hidden // heads)
    rotated = metadata.get("llama.rope.dimension_count", head_dim)
    if head_dim % 2 or rotated != head_dim:
        raise ModelFileError(
            f"{metadata.path}: llama.rope.dimension_count: {rotated}; accepted: the even head size {head_dim}"
        )
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


def read_tokenizer_spec(metadata: _Metadata) -> TokenizerSpec:
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ModelFileError(f"{metadata.path}: tokenizer.ggml.model: {model!r}; accepted: 'gpt2' (byte-level BPE)")
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
        eos_ids=find_end_tokens(tokens, control_ids, eos_id),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        chat_template=metadata.get("tokenizer.chat_template"),
    )
    spec.check(str(metadata.path))
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
