"""What a model is once it has been read, whatever file it came from: names and layout of Hugging Face."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from reference_server.model_config import ModelConfig
from reference_server.tokenizer import TokenizerSpec
from sloscope.errors import ModelFileError


@dataclass(slots=True)
class Checkpoint:
    config: ModelConfig
    state: dict[str, Tensor]  # Hugging Face name -> tensor
    tokenizer: TokenizerSpec
    output_mask: Tensor | None = None  # [vocab], added to all logits; see sampler
    mask_eos: bool = False  # whether requests that do not say otherwise mask the end tokens


class Fields:
    """Key-value part of a model file; a missing or unusable value is a ModelFileError that names it."""

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        self.source = source
        self._values = values

    def get(self, key: str, default: Any = None) -> Any:
        """`default` for null too: configs write it for what they leave open."""
        value = self._values.get(key)
        return default if value is None else value

    def need(self, key: str, kind: type) -> Any:
        value = self.get(key)
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(key, kind.__name__)
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        value: int = self.need(key, int) if default is None else self.get(key, default)
        if not isinstance(value, int) or value < 1:
            raise self.error(key, "an integer above 0")
        return value

    def error(self, key: str, accepted: str) -> ModelFileError:
        found = "missing" if self.get(key) is None else f"{self.get(key)!r:.60}"
        return ModelFileError(f"{self.source}: {key}: {found}; accepted: {accepted}")
