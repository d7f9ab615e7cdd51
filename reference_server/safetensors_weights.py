"""Weights of a Llama-family model from a directory in Hugging Face's layout.

config.json                    sizes
model.safetensors              tensors, or several files with model.safetensors.index.json
tokenizer.json                 see hf_tokenizer
generation_config.json         optional: more tokens that end an answer
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from reference_server.hf_tokenizer import read_json, read_tokenizer_spec
from reference_server.model import tensor_shapes
from reference_server.model_config import ModelConfig
from reference_server.tokenizer import TokenizerSpec
from reference_server.weights import Checkpoint, Fields
from sloscope.errors import ModelFileError

INDEX = "model.safetensors.index.json"
_DTYPES = ("F32", "BF16", "F16")
# Tables that older checkpoints keep beside the weights; they follow from the config.
_DERIVED = ".rotary_emb.inv_freq"


def read_safetensors(directory: Path, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """Raises ModelFileError for anything but a complete Llama model."""
    fields = read_json(directory / "config.json")
    _check_architecture(fields)
    vocab = fields.positive("vocab_size")
    tokenizer = read_tokenizer_spec(directory, fields, vocab)
    config = _read_config(fields, vocab, tokenizer)
    with ExitStack() as stack:
        files = {path: stack.enter_context(_open(path)) for path in _weight_files(directory)}
        return Checkpoint(config, _read_tensors(directory, config, files, dtype), tokenizer)


def _check_architecture(fields: Fields) -> None:
    """What the forward pass does not do would change the output without a word."""
    if fields.get("model_type") != "llama":
        raise fields.error("model_type", "'llama'")
    if fields.get("architectures", ["LlamaForCausalLM"]) != ["LlamaForCausalLM"]:
        raise fields.error("architectures", "['LlamaForCausalLM']")
    for key, only in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if fields.get(key, only) != only:
            raise fields.error(key, repr(only))
    if fields.get("quantization_config") is not None:
        raise fields.error("quantization_config", f"none; tensors of {', '.join(_DTYPES)}")


def _rope_theta(fields: Fields) -> float:
    """Newer configs hold it in `rope_parameters`, older ones beside `rope_scaling`."""
    theta = fields.get("rope_theta", 10_000.0)
    for key in ("rope_parameters", "rope_scaling"):
        rope = fields.get(key, {})
        if not isinstance(rope, dict):
            raise fields.error(key, "an object")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ModelFileError(f"{fields.source}: {key}.rope_type: {kind!r:.40}; accepted: 'default' (no scaling)")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise fields.error(key, "partial_rotary_factor 1.0")
        theta = rope.get("rope_theta", theta)
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
        raise ModelFileError(f"{fields.source}: rope_theta: {theta!r:.40}; accepted: a number above 0")
    return float(theta)


def _read_config(fields: Fields, vocab: int, tokenizer: TokenizerSpec) -> ModelConfig:
    hidden, heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    kv_heads = fields.positive("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of {heads}")
    head_dim = fields.positive("head_dim", default=hidden // heads)
    if head_dim % 2:
        raise fields.error("head_dim", f"an even number, here {head_dim}")
    return ModelConfig(
        layers=fields.positive("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=fields.positive("intermediate_size"),
        vocab=vocab,
        rope_theta=_rope_theta(fields),
        norm_eps=fields.need("rms_norm_eps", float),
        tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
        max_context=fields.positive("max_position_embeddings"),
        bos_id=tokenizer.bos_id,
        eos_ids=tokenizer.eos_ids,
    )


def _weight_files(directory: Path) -> list[Path]:
    if (directory / INDEX).is_file():
        index = read_json(directory / INDEX)
        names = sorted(set(index.need("weight_map", dict).values()), key=str)
        for name in names:
            # The index comes with the model, from anyone: it may name what lies beside it, nothing else.
            if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
                raise ModelFileError(
                    f"{index.source}: weight_map: {name!r:.60}; accepted: .safetensors files of the same directory"
                )
        return [directory / name for name in names]
    paths = sorted(directory.glob("*.safetensors"))
    if len(paths) != 1:
        found = "no .safetensors file" if not paths else f"{len(paths)} .safetensors files and no {INDEX}"
        raise ModelFileError(f"{directory}: {found}; accepted: one, or several with their index")
    return paths


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise ModelFileError(f"{path}: no such file; accepted: every file that {INDEX} names") from error
    except (SafetensorError, OSError) as error:
        raise ModelFileError(
            f"{path}: damaged or truncated safetensors file ({error}); accepted: a whole one"
        ) from error


def _read_tensors(
    directory: Path, config: ModelConfig, files: dict[Path, Any], dtype: torch.dtype
) -> dict[str, Tensor]:
    found = dict(_tensors(files))
    shapes = tensor_shapes(config)
    for name in shapes:
        if name not in found:
            raise ModelFileError(f"{directory}: tensor {name}: missing; accepted: all {len(shapes)} of this config")
    for name, path in found.items():
        if name not in shapes and not (name == "lm_head.weight" and config.tie_embeddings):
            raise ModelFileError(f"{path}: tensor {name}: not known; accepted: plain Llama without extras")
    state = {name: _read_tensor(found[name], files[found[name]], name, shape) for name, shape in shapes.items()}
    if config.tie_embeddings and "lm_head.weight" in found:
        path, embedding = found["lm_head.weight"], state["model.embed_tokens.weight"]
        if not torch.equal(_read_tensor(path, files[path], "lm_head.weight", tuple(embedding.shape)), embedding):
            raise ModelFileError(
                f"{path}: tensor lm_head.weight: differs from the embedding; accepted: the same, since they are tied"
            )
    # The tensors are views of the file: copied, so that the file can go.
    return {name: tensor.to(dtype, copy=True) for name, tensor in state.items()}


def _tensors(files: dict[Path, Any]) -> Iterator[tuple[str, Path]]:
    seen: dict[str, Path] = {}
    for path, file in files.items():
        for name in file.keys():  # noqa: SIM118  # not a mapping
            if name.endswith(_DERIVED):
                continue
            if name in seen:
                raise ModelFileError(f"{path}: tensor {name}: also in {seen[name].name}; accepted: each in one file")
            seen[name] = path
            yield name, path


def _read_tensor(path: Path, file: Any, name: str, shape: tuple[int, ...]) -> Tensor:
    stored = file.get_slice(name)
    if stored.get_dtype() not in _DTYPES:
        raise ModelFileError(f"{path}: tensor {name}: type {stored.get_dtype()}; accepted: {', '.join(_DTYPES)}")
    if tuple(stored.get_shape()) != shape:
        raise ModelFileError(f"{path}: tensor {name}: shape {tuple(stored.get_shape())}; accepted: {shape}")
    tensor: Tensor = file.get_tensor(name)
    return tensor
