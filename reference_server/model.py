"""The Llama forward pass over a flat batch: tokens of all sequences side by side, one product per weight.

Attention and the KV cache are not here. `forward` is given a function that stores the new keys and values and
attends, so that how KV is laid out can change without touching the model.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from reference_server.model_config import ModelConfig

# (layer, q [tokens, heads, head_dim], keys then values [tokens, 2 * kv_heads, head_dim]) -> [tokens, heads * head_dim]
Attend = Callable[[int, Tensor, Tensor], Tensor]

# The plain weights double the memory, so they have to save this share of a step of one token.
ONE_ROW_GAIN = 0.1
ONE_ROW_TRIALS = 4


class Projection:
    """x @ weight.T. On a CPU the weight is kept in oneDNN's blocked layout.

    Why: at 2 to 64 rows the blocked kernel reads memory at full speed; `F.linear` on the plain layout takes up to 3
    times as long. The operators are those that torch.compile uses for frozen weights; without them F.linear serves.
    For one row it depends on the machine, so `plain` stays until `Llama` has tried both.
    """

    def __init__(self, weight: Tensor) -> None:  # [out, in]
        self.out_features, self.in_features = weight.shape
        self.plain: Tensor | None = weight
        self.packed = None
        if weight.device.type == "cpu" and _can_pack(weight.dtype):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight)

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:  # [tokens, in] -> [tokens, out]
        if self.packed is None or (self.plain is not None and x.shape[0] == 1):
            return self.by_plain(x, added)
        return self.by_packed(x, added)

    def by_plain(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        assert self.plain is not None
        product = F.linear(x, self.plain)
        return product if added is None else product.add_(added)

    def by_packed(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        if added is not None:
            return torch.ops.mkldnn._linear_pointwise.binary(x, added, self.packed, None, "add")
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")


def _can_pack(dtype: torch.dtype) -> bool:
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    # oneDNN knows bfloat16 only where the CPU does.
    return dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


@dataclass(slots=True)
class Layer:
    attention_norm: Tensor  # [hidden]
    qkv: Projection  # hidden -> (heads + 2 * kv_heads) * head_dim, in the order q, k, v
    output: Projection  # heads * head_dim -> hidden
    feed_forward_norm: Tensor  # [hidden]
    gate_up: Projection  # hidden -> 2 * intermediate
    down: Projection  # intermediate -> hidden


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of this config has, under its Hugging Face name."""
    c = config
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab, c.hidden),
        "model.norm.weight": (c.hidden,),
    }
    if not c.tie_embeddings:
        shapes["lm_head.weight"] = (c.vocab, c.hidden)
    for i in range(c.layers):
        shapes |= {
            f"model.layers.{i}.input_layernorm.weight": (c.hidden,),
            f"model.layers.{i}.self_attn.q_proj.weight": (q, c.hidden),
            f"model.layers.{i}.self_attn.k_proj.weight": (kv, c.hidden),
            f"model.layers.{i}.self_attn.v_proj.weight": (kv, c.hidden),
            f"model.layers.{i}.self_attn.o_proj.weight": (c.hidden, q),
            f"model.layers.{i}.post_attention_layernorm.weight": (c.hidden,),
            f"model.layers.{i}.mlp.gate_proj.weight": (c.intermediate, c.hidden),
            f"model.layers.{i}.mlp.up_proj.weight": (c.intermediate, c.hidden),
            f"model.layers.{i}.mlp.down_proj.weight": (c.hidden, c.intermediate),
        }
    return shapes


class Llama:
    """Weights ready to run. All parameters have one dtype and live on one device."""

    def __init__(
        self, config: ModelConfig, state: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        def take(name: str) -> Tensor:
            return state[name].to(device=device, dtype=dtype)

        self.config = config
        self.dtype = dtype
        self.device = device
        self.embedding = take("model.embed_tokens.weight")
        self.layers = []
        for i in range(config.layers):
            at = f"model.layers.{i}."
            self.layers.append(
                Layer(
                    attention_norm=take(at + "input_layernorm.weight"),
                    qkv=Projection(torch.cat([take(f"{at}self_attn.{p}_proj.weight") for p in "qkv"])),
                    output=Projection(take(at + "self_attn.o_proj.weight")),
                    feed_forward_norm=take(at + "post_attention_layernorm.weight"),
                    gate_up=Projection(torch.cat([take(f"{at}mlp.{p}_proj.weight") for p in ("gate", "up")])),
                    down=Projection(take(at + "mlp.down_proj.weight")),
                )
            )
        self.norm = take("model.norm.weight")
        self.head = Projection(self.embedding if config.tie_embeddings else take("lm_head.weight"))
        if self.head.packed is not None:
            self._choose_for_one_row()
        self._norm_eps = torch.tensor(config.norm_eps)
        self.cos, self.sin = rotary_table(config, dtype, device)

    @torch.inference_mode()
    def _choose_for_one_row(self) -> None:
        """Keeps the plain weights beside the packed ones where a step of one token is faster by them."""
        products = [p for layer in self.layers for p in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        products.append(self.head)
        inputs = {p.in_features: torch.zeros(1, p.in_features, dtype=self.dtype) for p in products}
        plain = [(product.by_plain, inputs[product.in_features]) for product in products]
        packed = [(product.by_packed, inputs[product.in_features]) for product in products]
        took_s: list[list[float]] = [[], []]
        for _ in range(ONE_ROW_TRIALS):
            for side, times in zip((plain, packed), took_s, strict=True):
                start = time.monotonic()
                for product, x in side:
                    product(x)
                times.append(time.monotonic() - start)
        if min(took_s[0]) > min(took_s[1]) * (1 - ONE_ROW_GAIN):
            for projection in products:
                projection.plain = None

    def forward(self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor | None, attend: Attend) -> Tensor:
        """token_ids and positions [tokens]; logit_rows [n] names the tokens whose successor is wanted, None: all.

        Returns logits [n, vocab] in float32.
        """
        c = self.config
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        x = self.embedding[token_ids]  # [tokens, hidden]
        for i, layer in enumerate(self.layers):
            h = self._norm(x, layer.attention_norm)
            qkv = layer.qkv(h).view(-1, c.heads + 2 * c.kv_heads, c.head_dim)
            rotate_(qkv[:, : c.heads + c.kv_heads], cos, sin)
            x = layer.output(attend(i, qkv[:, : c.heads], qkv[:, c.heads :]), added=x)
            h = self._norm(x, layer.feed_forward_norm)
            gate, up = layer.gate_up(h).chunk(2, dim=-1)
            x = layer.down(F.silu(gate).mul_(up), added=x)
        x = x if logit_rows is None else x.index_select(0, logit_rows)
        return self.head(self._norm(x, self.norm)).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.device.type != "cpu" or x.dtype != torch.float32:
            return F.rms_norm(x, (self.config.hidden,), weight, self.config.norm_eps)
        # The same in half as many operations as rms_norm is made of on a CPU, where each costs a microsecond or two.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self._norm_eps, length, length, value=1 / self.config.hidden).rsqrt_()
        return torch.mul(x, scale).mul_(weight)


def rotary_table(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and signed sin, [max_context, head_dim].

    The first half of the sin is negated, so that rotating a vector is x * cos + swap_halves(x) * sin.
    """
    half = config.head_dim // 2
    # In float32, as models are trained; in float64 the angles at large positions would differ from theirs.
    frequency = 1.0 / (config.rope_theta ** (torch.arange(half, dtype=torch.float32) * 2 / config.head_dim))
    angle = torch.outer(torch.arange(config.max_context, dtype=torch.float32), frequency)
    cos, sin = angle.cos(), angle.sin()
    return (
        torch.cat([cos, cos], dim=-1).to(device=device, dtype=dtype),
        torch.cat([-sin, sin], dim=-1).to(device=device, dtype=dtype),
    )


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:  # [tokens, n, head_dim], [tokens, 1, head_dim]
    torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin, out=x)
