"""The sizes of a Llama-family model. Pure: the planner and the cost model use them without torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the forward pass, the KV budget and the cost model need to know about a model.

    `max_context` is the trained context length in tokens; a runner may hold less. `eos_ids` are all tokens
    that end an answer.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    rope_theta: float
    norm_eps: float
    tie_embeddings: bool
    max_context: int
    bos_id: int | None
    eos_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.heads % self.kv_heads == 0, f"{self.heads} query heads do not share {self.kv_heads} KV heads"
        assert self.head_dim % 2 == 0, "rotary embedding turns pairs of dimensions"

    @property
    def kv_values_per_token(self) -> int:
        """Numbers (not bytes) that one token leaves in the KV cache, keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def matmul_weights(self) -> int:
        """Weights that every step reads: projections and output head, without the embedding lookup."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        feed_forward = 3 * self.hidden * self.intermediate
        return self.layers * (attention + feed_forward) + self.vocab * self.hidden
