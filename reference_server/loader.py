"""From the name of a model to a runner that can take its first step."""

import torch

from reference_server.builtin import make_builtin
from reference_server.gguf_weights import read_gguf
from reference_server.kv_blocks import BLOCK_TOKENS
from reference_server.model import Llama
from reference_server.model_store import ModelSource
from reference_server.runner import Runner
from reference_server.safetensors_weights import read_safetensors
from reference_server.weights import Checkpoint
from sloscope.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_checkpoint(source: ModelSource, dtype: torch.dtype = torch.float32) -> Checkpoint:
    if source.path is None:
        return make_builtin(dtype, name=source.name)
    return (read_safetensors if source.path.is_dir() else read_gguf)(source.path, dtype)


def make_runner(
    checkpoint: Checkpoint,
    kv_blocks: int,
    block_tokens: int = BLOCK_TOKENS,
    max_context: int | None = None,
    dtype: str = "float32",
    device: str = "cpu",
) -> Runner:
    """The checkpoint's tensors are dropped once they are packed; its config and tokenizer stay."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype: {dtype!r}; accepted: {', '.join(DTYPES)}")
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        accepted = "cpu, cuda" if torch.cuda.is_available() else "cpu (no CUDA device is visible)"
        raise ConfigError(f"device: {device!r}; accepted: {accepted}")
    with torch.inference_mode():
        model = Llama(checkpoint.config, checkpoint.state, DTYPES[dtype], torch.device(device))
        checkpoint.state.clear()
        return Runner(model, kv_blocks, block_tokens, max_context, checkpoint.output_mask)
