"""What the engine says of itself: journal records and metrics of its requests, its steps and its decisions."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from reference_server.cost_model import FitError, StepShape
from reference_server.forecast import Forecast
from reference_server.model_config import ModelConfig
from reference_server.orders import ServiceUnit
from reference_server.remaining import Lengths
from reference_server.request import ENDED, Request, State
from reference_server.scheduler import Emitted, Scheduler, StepPlan, Transition
from reference_server.step_types import StepResult
from reference_server.work import step_work
from sloscope import records
from sloscope.exposition import MetricStore
from sloscope.journal import JournalWriter

LIVE_STATES = tuple(state for state in State if state not in ENDED)
PAUSE_ENDS = {State.DECODE: "resumed", State.PREEMPTED: "preempted"}
# What any engine may say; its admission policy declares the rest.
ADMISSIONS = (
    ("queue", "no_slot"),
    ("queue", "no_kv"),
    ("queue", "behind"),
    ("refuse", "context"),
    ("refuse", "kv_never_fits"),
    ("refuse", "queue_full"),
)


class Identity(NamedTuple):
    """What the journal says of this engine, once. `ceilings` are its fields of that name, where they were measured;
    `service_gap_bound` None: its order promises none."""

    model: str
    dtype: str
    device: str
    threads: int
    policies: Mapping[str, str | float]
    ceilings: Mapping[str, float]
    service_gap_bound: float | None


class Ledger:
    def __init__(
        self,
        scheduler: Scheduler,
        metrics: MetricStore,
        journal: JournalWriter | None,
        config: ModelConfig,
        dtype_bytes: int = 4,
        unit: ServiceUnit | None = None,
        lengths: Lengths | None = None,
    ) -> None:
        """`lengths` None: policies have no length table, and take answers to be as long as they may."""
        self._scheduler = scheduler
        self.metrics = metrics
        self._journal = journal
        self._config = config
        self._dtype_bytes = dtype_bytes
        self._unit = unit or ServiceUnit()
        self._lengths = lengths
        self._predicted_ns: dict[str, int] = {}  # first tokens that admission predicted, by request
        self._paused_ns: dict[str, int] = {}
        self._journal_counted = (0, 0, 0)
        self._preempted: list[str] = []  # since the last step
        self._waited: set[str] = set()  # classes that somebody waited in, as labels
        self._init_metrics()

    def _init_metrics(self) -> None:
        """Every child from the start, so that a first increment is not lost to rate()."""
        metrics = self.metrics
        for state in LIVE_STATES:
            metrics.init("sloscope_engine_requests", (state,))
        for kind in ("resident", "reserved", "free"):
            metrics.init("sloscope_engine_kv_blocks", (kind,))
        for decision in (*ADMISSIONS, *self._scheduler.policies.admission.reasons):
            metrics.init("sloscope_engine_admissions_total", decision)
        metrics.init("sloscope_engine_service_units_total", (metrics.bounded("tenant", ""),))
        metrics.init("sloscope_engine_pauses_total", ("flow_control",))
        for name in ("journal_records", "journal_dropped", "journal_bytes", "tenant_overflow"):
            metrics.init(f"sloscope_{name}_total", ("engine",))
        for end in ("resumed", "slow_reader", "preempted", "left"):
            metrics.init("sloscope_engine_pause_seconds", (end,))
        for phase in ("prefill", "decode"):
            for part in ("linear", "attention"):
                metrics.init("sloscope_engine_work_flops_total", (phase, part))
        for part in ("weights", "kv_read", "kv_write", "transfer"):
            metrics.init("sloscope_engine_work_bytes_total", (part,))

    def introduce(self, identity: Identity, at_ns: int, clock_id: str) -> None:
        """One `engine` record, and the ceilings as gauges."""
        limits, pool = self._scheduler.limits, self._scheduler.pool
        ceilings = dict(identity.ceilings)
        self.append(
            "engine",
            at_ns=at_ns,
            clock_id=clock_id,
            model=identity.model,
            dtype=identity.dtype,
            device=identity.device,
            threads=identity.threads,
            kv_blocks=pool.blocks,
            block_tokens=pool.block_tokens,
            max_batch=limits.slots,
            policies=dict(identity.policies),
            unit_prompt=self._unit.prompt,
            unit_output=self._unit.output,
            service_gap_bound=identity.service_gap_bound,
            **ceilings,
        )
        if (flops := ceilings.get("ceiling_flops_per_s")) is not None:
            self.metrics.set("sloscope_engine_ceiling_flops_per_second", flops)
        for part in ("weight", "kv", "transfer"):
            if (rate := ceilings.get(f"ceiling_{part}_bytes_per_s")) is not None:
                self.metrics.set(
                    "sloscope_engine_ceiling_bytes_per_second", rate, ("weights" if part == "weight" else part,)
                )

    def append(self, kind: str, **fields: Any) -> None:
        if self._journal is not None:
            self._journal.append(records.make(kind, **fields))

    # --- requests

    def settle(self, at_ns: int) -> list[Transition]:
        """Records every transition and decision since the last call, and returns the transitions."""
        transitions = self._scheduler.take_transitions()
        for transition in transitions:
            self._count(transition, at_ns)
            request, before, after, reason = transition
            self.append(
                "state",
                request_id=request.key,
                attempt=0,
                at_ns=at_ns,
                from_state=before,
                to_state=after,
                reason=reason,
            )
        for request, judgement in self._scheduler.take_decisions():
            self.metrics.inc("sloscope_engine_admissions_total", 1, (judgement.verdict, judgement.reason))
            if judgement.verdict != "refuse" and judgement.predicted_first_token_ns is not None:
                self._predicted_ns[request.key] = judgement.predicted_first_token_ns
            self.append(
                "decision",
                request_id=request.key,
                attempt=0,
                at_ns=at_ns,
                verdict=judgement.verdict,
                reason=judgement.reason,
                predicted_first_token_ns=judgement.predicted_first_token_ns,
                slack_ns=judgement.slack_ns,
                feasible=judgement.feasible,
                resource_safe=judgement.resource_safe,
                policy=self._scheduler.policies.admission.name,
                **_planned(judgement.plan),
                **self._assumed(request),
            )
        return transitions

    def _assumed(self, request: Request) -> dict[str, Any]:
        """How much of what policies take for the request's length is not known from earlier answers."""
        if self._lengths is None:
            return {}
        left = self._lengths.of(request)
        return {"length_source": left.source, "length_unresolved": left.unresolved}

    def _count(self, transition: Transition, at_ns: int) -> None:
        metrics = self.metrics
        request, before, after, reason = transition
        if before is None and metrics.bounded("tenant", request.tenant) != request.tenant:
            metrics.inc("sloscope_tenant_overflow_total", 1, ("engine",))
        if before is State.WAITING and after is State.PREFILL:
            metrics.observe("sloscope_engine_queue_seconds", at_ns - request.queued_ns)
        if after is State.PREEMPTED:
            metrics.inc("sloscope_engine_preemptions_total")
            self._preempted.append(request.key)
        if after is State.PAUSED:
            metrics.inc("sloscope_engine_pauses_total", 1, (reason,))
            self._paused_ns[request.key] = at_ns
        elif before is State.PAUSED:
            end = PAUSE_ENDS.get(after, "slow_reader" if reason == "slow_reader" else "left")
            metrics.observe("sloscope_engine_pause_seconds", at_ns - self._paused_ns.pop(request.key), (end,))
        if after in ENDED:
            self._predicted_ns.pop(request.key, None)

    def cleaned_up(self, key: str, seen_ns: int, freed_ns: int | None) -> None:
        """An abort reached the scheduler at `seen_ns`; the last KV of the request was free at `freed_ns`, None when it
        held none, or holds it still."""
        if freed_ns is not None:
            self.metrics.observe("sloscope_engine_cancel_cleanup_seconds", freed_ns - seen_ns)
        self.append("late", request_id=key, attempt=0, observer="engine", abort_seen_ns=seen_ns, kv_freed_ns=freed_ns)

    # --- steps

    def step(
        self,
        step_id: int,
        plan: StepPlan,
        shape: StepShape,
        emitted: Sequence[Emitted],
        start_ns: int,
        result: StepResult,
        fault: str | None,
    ) -> None:
        work = step_work(self._config, plan.items, self._dtype_bytes, plan.decodes)
        pool = self._scheduler.pool
        self.append(
            "step",
            step_id=step_id,
            start_ns=start_ns,
            end_ns=result.end_ns,
            device_ns=result.end_ns - result.start_ns if result.device_ns is None else result.device_ns,
            prefill_tokens=plan.prefill_tokens,
            decode_tokens=plan.decodes,
            sampled_tokens=len(emitted),
            kv_read_tokens=shape.kv_read_tokens,
            reused_tokens=plan.reused or None,
            token_budget=plan.token_budget,
            prefill_ids=[request.key for request in plan.prefill],
            prefill_token_counts=[len(item.token_ids) for item in plan.items[plan.decodes :]],
            prefill_charged_counts=plan.fresh[plan.decodes :],
            decode_ids=[request.key for request in plan.decode],
            kv_blocks_resident=pool.resident,
            kv_blocks_reserved=pool.reserved,
            kv_blocks_free=pool.free,
            kv_blocks_cached=pool.cached,
            preempted_ids=self._preempted or None,
            paused_ids=[r.key for r in self._scheduler.running() if r.state is State.PAUSED] or None,
            modelled_flops=work.flops,
            modelled_bytes=work.bytes,
            fault=fault,
            captured=result.captured or None,
            **work._asdict(),
        )
        self._preempted = []
        metrics = self.metrics
        metrics.observe("sloscope_engine_step_seconds", result.end_ns - start_ns)
        if plan.decodes == len(plan.items):
            metrics.observe("sloscope_engine_decode_step_seconds", result.end_ns - start_ns)
        metrics.inc("sloscope_engine_modelled_flops_total", work.flops)
        metrics.inc("sloscope_engine_modelled_bytes_total", work.bytes)
        for phase, part, flops in (
            ("prefill", "linear", work.prefill_linear_flops),
            ("prefill", "attention", work.prefill_attention_flops),
            ("decode", "linear", work.decode_linear_flops),
            ("decode", "attention", work.decode_attention_flops),
        ):
            metrics.inc("sloscope_engine_work_flops_total", flops, (phase, part))
        for part, moved in (
            ("weights", work.weight_bytes),
            ("kv_read", work.kv_read_bytes),
            ("kv_write", work.kv_write_bytes),
            ("transfer", work.transfer_bytes),
        ):
            metrics.inc("sloscope_engine_work_bytes_total", moved, (part,))
        metrics.inc("sloscope_engine_prompt_tokens_total", sum(plan.fresh))
        metrics.inc("sloscope_engine_recomputed_tokens_total", plan.recomputed_tokens)
        metrics.inc("sloscope_engine_output_tokens_total", len(emitted))
        metrics.inc("sloscope_engine_prefix_reused_tokens_total", plan.reused)
        self._charge(plan)

    def tokens(self, emitted: Sequence[Emitted], before_ns: Sequence[int], computed_ns: int) -> None:
        """`before_ns`: when each of these sequences had its token before."""
        metrics = self.metrics
        intervals = []
        for (request, *_), last_ns in zip(emitted, before_ns, strict=True):
            if len(request.output) > 1:
                intervals.append(computed_ns - last_ns)
                continue
            metrics.observe("sloscope_engine_prefill_seconds", computed_ns - request.started_ns)
            metrics.observe("sloscope_engine_ttft_seconds", computed_ns - request.arrived_ns)
            predicted_ns = self._predicted_ns.pop(request.key, None)
            if predicted_ns is not None:
                late_ns = computed_ns - predicted_ns
                sign = "late" if late_ns > 0 else "early"
                metrics.observe(f"sloscope_engine_first_token_{sign}_seconds", abs(late_ns))
        metrics.observe_many("sloscope_engine_token_interval_seconds", intervals)

    def _charge(self, plan: StepPlan) -> None:
        units: dict[str, float] = {}
        for request, item, fresh in zip(plan.requests, plan.items, plan.fresh, strict=True):
            served = self._unit.prompt * fresh + self._unit.output * item.sample
            units[request.tenant] = units.get(request.tenant, 0) + served
        for tenant, served in units.items():
            label = (self.metrics.bounded("tenant", tenant),)
            self.metrics.inc("sloscope_engine_service_units_total", served, label)

    # --- as of now

    def gauges(self, now_ns: int, cost_error: FitError, lengths_age_ns: int | None) -> None:
        metrics, scheduler = self.metrics, self._scheduler
        counts = scheduler.count_by_state()
        for state in LIVE_STATES:
            metrics.set("sloscope_engine_requests", counts[state], (state,))
        ages_ns = dict.fromkeys(self._waited, 0)
        for name, since_ns in scheduler.waiting_since().items():
            label = metrics.bounded("class", name)
            ages_ns[label] = max(ages_ns.get(label, 0), now_ns - since_ns)
        for label, age_ns in ages_ns.items():
            metrics.set("sloscope_engine_oldest_waiting_seconds", age_ns / 1e9, (label,))
        self._waited.update(ages_ns)
        pool = scheduler.pool
        for kind, blocks in (("resident", pool.resident), ("reserved", pool.reserved), ("free", pool.free)):
            metrics.set("sloscope_engine_kv_blocks", blocks, (kind,))
        metrics.set("sloscope_engine_kv_blocks_cached", pool.cached)
        metrics.set("sloscope_engine_kv_blocks_paused", scheduler.paused_blocks())
        for q, error in (("0.5", cost_error.median), ("0.9", cost_error.p90)):
            if error is not None:
                metrics.set("sloscope_engine_cost_error_ratio", error, (q,))
        if lengths_age_ns is not None:
            metrics.set("sloscope_engine_lengths_age_seconds", lengths_age_ns / 1e9)
        self._count_journal()

    def _count_journal(self) -> None:
        """Both processes of the server write a journal of this observer, so each adds what it wrote since."""
        if self._journal is None:
            return
        now = self._journal.written, self._journal.lost, self._journal.bytes
        names = ("records_total", "dropped_total", "bytes_total")
        for name, value, before in zip(names, now, self._journal_counted, strict=True):
            self.metrics.inc(f"sloscope_journal_{name}", value - before, ("engine",))
        self._journal_counted = now


def _planned(plan: Forecast | None) -> dict[str, int]:
    """The fields of a decision that say what its prediction is made of."""
    if plan is None:
        return {}
    return {
        "predicted_start_steps": plan.starts_after,
        "predicted_steps": plan.steps,
        "predicted_prefill_tokens": plan.work.prefill_tokens,
        "predicted_decode_tokens": plan.work.decode_tokens,
    }
