"""From what the command line says to the policies of a scheduler: the one place where they are put together."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from reference_server.admission import DOUBT, DeadlineAdmission
from reference_server.cost_model import CostModel, OnlineFit
from reference_server.fairness import QUANTUM, ServiceUnit, TenantOrder, service_gap_bound
from reference_server.kv_blocks import BlockPool
from reference_server.orders import LONGEST_WAIT_NS, OrderOptions, make_order
from reference_server.policies import Admission, AdmitAll, Full, Optimistic, PrefillBudget, Reservation
from reference_server.prefill_budget import LEAST_TOKENS, DecodeSlack, Static
from reference_server.remaining import GROUPINGS, KV_LEVEL, EstimatedReservation, Lengths
from reference_server.remaining_file import LengthFile
from reference_server.scheduler import Limits, Policies
from sloscope.errors import ConfigError
from sloscope.units import NS_PER_S, format_ns

T = TypeVar("T")
_UNIT = ServiceUnit()


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """Plain data; its defaults are those of the command line. `prefill_tokens` 0: whole prompts. Paths are text, empty
    for none."""

    order: str = "fcfs"
    lanes: tuple[str, ...] = ()
    lane_wait_ns: int = 10 * NS_PER_S
    unit_prompt: float = _UNIT.prompt
    unit_output: float = _UNIT.output
    quantum: float = QUANTUM
    longest_wait_ns: int = LONGEST_WAIT_NS
    tenant_weights: dict[str, float] = field(default_factory=dict)
    admission: str = "none"
    admission_doubt: float = DOUBT
    reservation: str = "full"
    lengths: str = ""
    lengths_by: str = GROUPINGS[0]
    length_level: float = KV_LEVEL
    prefill_tokens: int = 0
    prefill_slack: bool = False
    prefill_gap_ns: int = 100_000_000  # kept for decodes that declare no limit
    cost_model: str = ""

    def names(self) -> dict[str, str | float]:
        """For the journal; all but the service unit, which has fields of its own there. Of files the name alone."""
        chunk = str(self.prefill_tokens) if self.prefill_tokens else "whole"
        return {
            "order": self.order,
            "lanes": ",".join(self.lanes),
            "lane_wait": format_ns(self.lane_wait_ns),
            "quantum": self.quantum,
            "longest_wait": format_ns(self.longest_wait_ns),
            "tenant_weights": ",".join(f"{name}={weight:g}" for name, weight in sorted(self.tenant_weights.items())),
            "admission": self.admission,
            "admission_doubt": self.admission_doubt,
            "reservation": self.reservation,
            "lengths": Path(self.lengths).name,
            "lengths_by": self.lengths_by,
            "length_level": self.length_level,
            "prefill": f"slack, at most {chunk}" if self.prefill_slack else chunk,
            "prefill_gap": format_ns(self.prefill_gap_ns),
            "cost_model": Path(self.cost_model).name,
        }


class Parts(NamedTuple):
    policies: Policies
    unit: ServiceUnit
    cost: OnlineFit
    lengths: LengthFile | None


def assemble(choice: PolicyChoice) -> Parts:
    """ConfigError for what cannot be."""
    unit = ServiceUnit(choice.unit_prompt, choice.unit_output)
    starvation_ns = choice.lane_wait_ns if choice.lanes else None
    options = OrderOptions(unit, choice.tenant_weights, choice.quantum, choice.longest_wait_ns, starvation_ns)
    cost = OnlineFit(_cost_model(choice.cost_model))
    if choice.lengths_by not in GROUPINGS:
        raise ConfigError(f"--lengths-by: {choice.lengths_by!r}; accepted: {', '.join(GROUPINGS)}")
    lengths = Lengths(by=choice.lengths_by)
    file = LengthFile(Path(choice.lengths), lengths) if choice.lengths else None
    budget = _budget(choice, cost)
    reservations: dict[str, Callable[[], Reservation]] = {
        "full": Full,
        "optimistic": Optimistic,
        "estimate": lambda: EstimatedReservation(lengths, choice.length_level),
    }
    reservation = _one_of("--reservation", choice.reservation, reservations)
    admissions: dict[str, Callable[[], Admission]] = {
        "none": AdmitAll,
        "deadline": lambda: DeadlineAdmission(
            cost, lengths, reservation, budget, choice.admission_doubt, choice.length_level
        ),
    }
    admission = _one_of("--admission", choice.admission, admissions)
    policies = Policies(make_order(choice.order, options), admission, reservation, budget)
    if choice.reservation == "estimate" and file is None:
        raise ConfigError("--reservation: 'estimate' needs lengths; accepted: together with --lengths FILE")
    return Parts(policies, unit, cost, file)


def declared_gap_bound(policies: Policies, limits: Limits, pool: BlockPool) -> float | None:
    """How far two tenants that wait may drift apart in this engine, whatever is asked of it (decision 014).

    Service units by the tenant's weight. None: the order promises nothing, or there are lanes, which have one each.
    """
    order = policies.order
    if not isinstance(order, TenantOrder):
        return None
    pool_tokens = pool.blocks * pool.block_tokens
    longest = min(limits.max_context, pool_tokens)
    dearest = max([(longest - 1, 1), (1, longest - 1)], key=lambda request: order.unit.of(*request))
    return service_gap_bound(
        order.unit,
        max_prompt=dearest[0],
        max_output=dearest[1],
        pool_tokens=pool_tokens,
        # A paused request needs no slot, but a block at least.
        sequences=limits.slots if limits.max_undelivered is None else pool.blocks,
        whole=isinstance(policies.reservation, Full),
        least_weight=order.least_weight,
        quantum=order.quantum,
    )


def _budget(choice: PolicyChoice, cost: OnlineFit) -> PrefillBudget:
    most = choice.prefill_tokens or None
    if not choice.prefill_slack:
        return Static(most)
    least = min(LEAST_TOKENS, most or LEAST_TOKENS)
    return DecodeSlack(lambda: cost.model, least, most, default_gap_ns=choice.prefill_gap_ns)


def _cost_model(path: str) -> CostModel | None:
    if not path:
        return None
    accepted = "accepted: what `sloscope model fit --out` writes"
    try:
        if Path(path).exists() and not Path(path).is_file():  # two processes read it, which a pipe does not take
            raise ConfigError(f"--cost-model: {path!r}: is no file; {accepted}")
        return CostModel.from_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--cost-model: {path!r}: {error}; {accepted}") from None


def _one_of(flag: str, name: str, makers: Mapping[str, Callable[[], T]]) -> T:
    if name not in makers:
        raise ConfigError(f"{flag}: {name!r}; accepted: {', '.join(makers)}")
    return makers[name]()
