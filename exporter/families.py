"""What a request that ended adds to the receipt families: the same rule for the sidecar's and a client's receipts."""

from __future__ import annotations

from collections.abc import Sequence

from sloscope import catalogue
from sloscope.contract import Contract, Resolved
from sloscope.definitions import (
    Ended,
    Summary,
    Verdict,
    event_gaps_ns,
    judge,
    token_gaps_ns,
)
from sloscope.exposition import MetricStore
from sloscope.records import OUTCOMES

Labels = tuple[str, str, str]  # class, model, tenant
_NO_MODEL = "unknown"
_NO_TENANT = "default"
_OVERFLOW = "sloscope_tenant_overflow_total"
_ENDS = tuple((outcome, reason) for outcome, reasons in OUTCOMES.items() for reason in reasons)


class ReceiptFamilies:
    """The `sloscope_client_*` or `sloscope_sidecar_*` families of a store."""

    def __init__(self, store: MetricStore, point: str, contract: Contract) -> None:
        self.store = store
        self._contract = contract
        self._point = point
        self._inflight: dict[Labels, int] = {}

        def name(suffix: str) -> str:
            return catalogue.receipt(point, suffix).name

        self._offered, self._ended = name("requests_offered_total"), name("requests_total")
        self._qualified, self._misses = name("requests_qualified_total"), name("contract_misses_total")
        self._tokens, self._open = name("output_tokens_total"), name("inflight_requests")
        self._ttft, self._ttft_visible = name("ttft_seconds"), name("ttft_visible_seconds")
        self._itl, self._icl, self._itl_max = name("itl_seconds"), name("icl_seconds"), name("itl_max_seconds")
        self._tpot, self._e2e = name("tpot_seconds"), name("e2e_seconds")
        store.init(_OVERFLOW, (point,))
        self._ready: set[Labels] = set()
        for class_name in contract.classes:
            self._init((class_name, _NO_MODEL, _NO_TENANT))

    def _init(self, labels: Labels) -> None:
        """Children that exist before their first increment, or rate() would lose it."""
        self._ready.add(labels)
        for name in (self._offered, self._qualified, self._open):
            self.store.init(name, labels)
        for end in _ENDS:
            self.store.init(self._ended, (*labels, *end))
        for qualified in ("true", "false"):
            self.store.init(self._tokens, (*labels, qualified))
        row = self._contract.classes.get(labels[0])
        obligations = ["outcome", *(row.limits.declared() if row else ("class",))]
        if row is not None and row.limits.min_tokens > 1:
            obligations.append("min_tokens")  # below 2 the outcome says it: an empty answer has failed
        for obligation in obligations:
            self.store.init(self._misses, (*labels, obligation))
        for name in (self._ttft, self._ttft_visible, self._itl, self._icl, self._itl_max, self._tpot, self._e2e):
            self.store.init(name, labels)

    def begun(self, class_name: str, model: str, tenant: str) -> Labels:
        """Counts an offered request. The labels are those under which it has to end."""
        store = self.store
        model, named = store.bounded("model", model or _NO_MODEL), tenant or _NO_TENANT
        tenant = store.bounded("tenant", named)
        if tenant != named:
            store.inc(_OVERFLOW, 1, (self._point,))
        labels = (class_name, model, tenant)
        if labels not in self._ready:
            self._init(labels)
        store.inc(self._offered, 1, labels)
        self._count_open(labels, 1)
        return labels

    def _count_open(self, labels: Labels, change: int) -> None:
        count = self._inflight.get(labels, 0) + change
        assert count >= 0, "a request ended twice"
        self._inflight[labels] = count
        self.store.set(self._open, count, labels)

    def ended(
        self,
        labels: Labels,
        end: Ended,
        summary: Summary,
        resolved: Resolved,
        streamed: bool,
        t_ns: Sequence[int],
        choice: Sequence[int],
        event_tokens: Sequence[int] | None,
    ) -> Verdict:
        """Counts the end and everything that the request's receipts say. Stamps of one clock, in order."""
        row = self._contract.classes.get(resolved.class_name)
        verdict = judge(
            end.outcome,
            summary,
            resolved.limits,
            streamed=streamed,
            streaming=row.streaming if row else "required",
            class_known=resolved.known,
        )
        store = self.store
        store.inc(self._ended, 1, (*labels, end.outcome, end.reason))
        self._count_open(labels, -1)
        if verdict.qualified:
            store.inc(self._qualified, 1, labels)
        for obligation in verdict.misses:
            store.inc(self._misses, 1, (*labels, obligation))
        if summary.tokens:
            store.inc(self._tokens, summary.tokens, (*labels, "true" if verdict.qualified else "false"))
        for name, value in (
            (self._ttft, summary.ttft_ns),
            (self._ttft_visible, summary.ttft_visible_ns),
            (self._itl_max, summary.itl_max_ns),
            (self._e2e, summary.e2e_ns),
        ):
            if value is not None:
                store.observe(name, value, labels)
        if summary.span_ns is not None and summary.span_tokens is not None and summary.span_tokens > 1:
            # Rounded up, so that a value is below a bucket edge exactly when `judge` says it meets that limit.
            store.observe(self._tpot, -(-summary.span_ns // (summary.span_tokens - 1)), labels)
        gaps_ns = event_gaps_ns(t_ns, choice)
        store.observe_many(self._icl, gaps_ns, labels)
        if event_tokens is not None:
            is_one_each = event_tokens.count(1) == len(event_tokens)  # then the two are the same
            store.observe_many(self._itl, gaps_ns if is_one_each else token_gaps_ns(t_ns, choice, event_tokens), labels)
        return verdict


def known_event_tokens(
    tokens: Sequence[int | None] | None, events: int, n_choices: int, total: int | None, counted: bool
) -> list[int] | None:
    """Tokens per event where they are known, else None.

    `counted`: `total` comes from a source that counts tokens. A single choice with as many tokens as events has one
    in each, since an output event is never empty.
    """
    if tokens is not None and events and all(count is not None for count in tokens):
        return [count for count in tokens if count is not None]
    if counted and n_choices == 1 and events and total == events:
        return [1] * events
    return None
