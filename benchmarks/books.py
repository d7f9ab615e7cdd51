"""The books that an order is held to."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations

from reference_server.fairness import ServiceUnit


@dataclass
class Books:
    """Service per tenant, and how far two tenants ever drifted apart, by weight, while both were backlogged."""

    unit: ServiceUnit
    weights: Mapping[str, float]
    service: dict[str, float] = field(default_factory=dict)
    worst_gap: float = 0
    _spells: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)  # least and largest difference

    def note_service(self, tenant: str, prompt_tokens: int, output_tokens: int) -> None:
        self.service[tenant] = self.service.get(tenant, 0) + self.unit.of(prompt_tokens, output_tokens)

    def note_backlog(self, backlogged: set[str]) -> None:
        """After whatever may have changed the backlog or the service."""
        spells = {}
        for pair in combinations(sorted(backlogged), 2):
            a, b = (self.service.get(tenant, 0) / self.weights.get(tenant, 1) for tenant in pair)
            low, high = self._spells.get(pair, (a - b, a - b))
            low, high = min(low, a - b), max(high, a - b)
            spells[pair] = low, high
            self.worst_gap = max(self.worst_gap, high - low)
        self._spells = spells
