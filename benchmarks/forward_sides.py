"""Who computes the forward pass in `engine_cpu`: each side prefills one prompt and takes decode steps.

All have the same weights, dtype and threads. A decode step starts from `context` tokens of KV in every sequence, and
the KV goes back to that length after it, outside the measured time. Times are wall milliseconds.
"""

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import gguf
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from reference_server.kv_blocks import BLOCK_TOKENS
from reference_server.model import Llama, Projection
from reference_server.runner import Runner
from reference_server.step_types import StepItem
from reference_server.weights import Checkpoint
from sloscope.errors import ConfigError

GENERATED = 8  # tokens of one call of `generate`, which has work of its own to spread over them


PLAIN_FLOOR = "floor (plain products)"
PACKED_FLOOR = "floor (packed products)"
KV_FLOOR = "floor (plain products and a read of the KV)"


class Side(Protocol):
    name: str

    def prefill(self) -> float: ...
    def decode(self, batch: int) -> float: ...


class Product(NamedTuple):
    in_features: int
    of: Callable[[Tensor], Tensor]


def measured(work: Callable[[], object]) -> float:
    start_ns = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start_ns) / 1e6


class Products:
    """The floor: the model's matrix products alone, one after the other, on activations that are always the same.

    `kv` [layers, sequences, width]: each layer's part of it for the batch is read once, too, in a decode step.
    """

    def __init__(
        self,
        name: str,
        layers: Sequence[Product],
        head: Product,
        dtype: torch.dtype,
        context: int,
        kv: Tensor | None = None,
    ) -> None:
        self.name = name
        self._layers = layers
        self._head = head
        self._dtype = dtype
        self._context = context
        self._kv = kv
        self._inputs: dict[tuple[int, int], Tensor] = {}

    def prefill(self) -> float:
        return self._measure(self._context, sampled=1, kv_of=0)

    def decode(self, batch: int) -> float:
        return self._measure(batch, sampled=batch, kv_of=batch)

    @torch.inference_mode()
    def _measure(self, tokens: int, sampled: int, kv_of: int) -> float:
        x = {product.in_features: self._input(tokens, product.in_features) for product in self._layers}
        last = self._input(sampled, self._head.in_features)

        def run() -> None:
            for product in self._layers:
                product.of(x[product.in_features])
            if self._kv is not None and kv_of:
                for layer in self._kv:
                    layer[:kv_of].sum()
            self._head.of(last)

        return measured(run)

    def _input(self, rows: int, width: int) -> Tensor:
        key = (rows, width)
        if key not in self._inputs:
            self._inputs[key] = torch.randn(rows, width, dtype=self._dtype)
        return self._inputs[key]


def floors(checkpoint: Checkpoint, model: Llama, context: int, batch: int) -> list[Products]:
    """On plain weights by F.linear, on those that the model packed, and on plain ones with the KV of the batch."""
    c = checkpoint.config
    state = {name: tensor.to(model.dtype) for name, tensor in checkpoint.state.items()}

    def plain_product(*names: str) -> Product:
        weight = torch.cat([state[name] for name in names]) if len(names) > 1 else state[names[0]]
        return Product(weight.shape[1], lambda x: linear(x, weight))

    def packed_product(projection: Projection) -> Product:
        return Product(projection.in_features, projection if projection.packed is None else projection.by_packed)

    plain: list[Product] = []
    packed: list[Product] = []
    for i, layer in enumerate(model.layers):
        at = f"model.layers.{i}."
        plain += [
            plain_product(*(f"{at}self_attn.{p}_proj.weight" for p in "qkv")),
            plain_product(at + "self_attn.o_proj.weight"),
            plain_product(*(f"{at}mlp.{p}_proj.weight" for p in ("gate", "up"))),
            plain_product(at + "mlp.down_proj.weight"),
        ]
        packed += [packed_product(p) for p in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    head = plain_product("model.embed_tokens.weight" if c.tie_embeddings else "lm_head.weight")
    kv = torch.randn(c.layers, batch, context * 2 * c.kv_heads * c.head_dim, dtype=model.dtype)
    return [
        Products(PLAIN_FLOOR, plain, head, model.dtype, context),
        Products(PACKED_FLOOR, packed, packed_product(model.head), model.dtype, context),
        Products(KV_FLOOR, plain, head, model.dtype, context, kv),
    ]


class Ours:
    """`Runner.step`, with the choice of the tokens."""

    name = "sloscope"

    def __init__(self, model: Llama, prompts: Sequence[list[int]]) -> None:
        context = len(prompts[0])
        needed = -(-(context + 1) // BLOCK_TOKENS)
        self._prompts = prompts
        self._blocks = [range(i * needed, (i + 1) * needed) for i in range(len(prompts))]
        self._runner = Runner(model, len(prompts) * needed, BLOCK_TOKENS, context + 1)
        for blocks, prompt in zip(self._blocks, prompts, strict=True):
            self._runner.step([StepItem(blocks, prompt, 0, sample=True)])

    def prefill(self) -> float:
        item = StepItem(self._blocks[0], self._prompts[0], 0, sample=True)
        return measured(lambda: self._runner.step([item]))

    def decode(self, batch: int) -> float:
        context = len(self._prompts[0])
        items = [StepItem(blocks, [1], context, sample=True) for blocks in self._blocks[:batch]]
        return measured(lambda: self._runner.step(items))


def transformers_model(checkpoint: Checkpoint, dtype: torch.dtype) -> LlamaForCausalLM:
    c = checkpoint.config
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=c.vocab,
            hidden_size=c.hidden,
            intermediate_size=c.intermediate,
            num_hidden_layers=c.layers,
            num_attention_heads=c.heads,
            num_key_value_heads=c.kv_heads,
            head_dim=c.head_dim,
            max_position_embeddings=c.max_context,
            rms_norm_eps=c.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
            tie_word_embeddings=c.tie_embeddings,
            bos_token_id=c.bos_id,
            eos_token_id=list(c.eos_ids),
            pad_token_id=c.eos_ids[0],
        )
    )
    head = {"lm_head.weight": checkpoint.state["model.embed_tokens.weight"]} if c.tie_embeddings else {}
    model.load_state_dict(checkpoint.state | head)
    return model.to(dtype).eval()


class TransformersForward:
    """A call of the model with its DynamicCache; no choice of tokens."""

    name = "transformers forward"

    def __init__(self, model: LlamaForCausalLM, prompts: Sequence[list[int]], batches: Sequence[int]) -> None:
        self._model = model
        self._context = len(prompts[0])
        self._prompt = torch.tensor([prompts[0]])
        self._caches = {batch: self._fill(batch) for batch in batches}

    @torch.inference_mode()
    def _fill(self, batch: int) -> DynamicCache:
        cache = DynamicCache(config=self._model.config)
        self._model(self._prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache.batch_repeat_interleave(batch)
        return cache

    def _shorten(self, cache: DynamicCache) -> None:
        cache.crop(self._context - cache.get_seq_length())  # a negative number: how many go

    @torch.inference_mode()
    def prefill(self) -> float:
        cache = DynamicCache(config=self._model.config)
        return measured(lambda: self._model(self._prompt, past_key_values=cache, use_cache=True, logits_to_keep=1))

    @torch.inference_mode()
    def decode(self, batch: int) -> float:
        cache = self._caches[batch]
        new = torch.ones(batch, 1, dtype=torch.long)
        took = measured(lambda: self._model(new, past_key_values=cache, use_cache=True))
        self._shorten(cache)
        return took


class TransformersGenerate(TransformersForward):
    """`generate`, greedy, from a full cache on: a step is a GENERATED-th of a call."""

    name = "transformers generate"

    @torch.inference_mode()
    def prefill(self) -> float:
        mask = torch.ones_like(self._prompt)
        return measured(lambda: self._model.generate(self._prompt, attention_mask=mask, **self._greedy(1)))

    @torch.inference_mode()
    def decode(self, batch: int) -> float:
        cache = self._caches[batch]
        tokens = torch.cat([self._prompt, torch.ones(1, 1, dtype=torch.long)], dim=1).repeat(batch, 1)
        mask = torch.ones_like(tokens)
        greedy = self._greedy(GENERATED)
        took = measured(lambda: self._model.generate(tokens, attention_mask=mask, past_key_values=cache, **greedy))
        self._shorten(cache)
        return took / GENERATED

    def _greedy(self, tokens: int) -> dict[str, Any]:
        return {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}


class LlamaCpp:
    """llama.cpp in a process of the environment that has it; see llama_cpp_child."""

    name = "llama.cpp"

    def __init__(self, python: str, path: Path, prompts: Sequence[list[int]], dtype: str, threads: int) -> None:
        child = Path(__file__).with_name("llama_cpp_child.py")
        self._process = subprocess.Popen(
            [python, str(child)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        ready = self._ask(op="load", path=str(path), prompts=list(prompts), dtype=dtype, threads=threads)
        self.about = str(ready["about"])

    def _ask(self, **message: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            assert self._process.stderr is not None
            reason = (self._process.stderr.read().strip() or "it gave no reason").splitlines()[-1]
            raise ConfigError(f"--llama-python: the process ended: {reason}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def prefill(self) -> float:
        return float(self._ask(op="prefill")["ms"])

    def decode(self, batch: int) -> float:
        return float(self._ask(op="decode", batch=batch)["ms"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


def write_gguf(source: Path, target: Path, dtype: str) -> None:
    """The same model with its matrices in float32 or bfloat16, from the values that the source dequantizes to."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        array = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if dtype == "bfloat16" and array.ndim == 2:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(tensor.name, gguf.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
