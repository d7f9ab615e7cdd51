"""Receipts that real clients and browsers report: checked, then records and metrics like any other receipts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from exporter.families import ReceiptFamilies, known_event_tokens
from sloscope import records
from sloscope.clock import Clock
from sloscope.contract import LIMIT_NAMES, Contract, Resolved
from sloscope.definitions import Ended, summarise
from sloscope.errors import RecordError, SloscopeError
from sloscope.exposition import MetricStore
from sloscope.ids import is_request_id
from sloscope.journal import JournalWriter, is_journal_name, writer_of
from sloscope.records import (
    MAX_LABEL_TEXT,
    MAX_LABELS,
    MAX_NAME,
    MAX_TOKENS,
    OUTCOMES,
    OUTPUT_TYPES,
    TOKEN_SOURCES,
    Record,
)
from sloscope.units import NS_PER_S

MAX_BATCH = 1000
_MOST_LATE_NS = 24 * 3600 * NS_PER_S  # of a report, after the end that it reports
_MAX_EVENTS = 200_000
_MAX_CHOICES = 1024
_MAX_NS = 2**62  # compaction takes no larger stamp: sums with an offset between clocks must fit a column
_REMEMBERED = 100_000
_MAX_REASON = 64  # characters of a finish reason, as the stream decoder cuts them
_OWN_LIMITS = tuple(f"{name}_ns" for name in LIMIT_NAMES)
_REJECTED = "sloscope_receipts_rejected_total"
CAUSES = ("duplicate", "malformed", "outcome", "rate", "request_id", "stamps", "too_large", "unknown_class")
_LATE = ("request_id", "attempt", "outcome", "reason", "observer")
_FIELDS = (
    *_LATE, "clock_id", "send_ns", "intended_ns", "t_ns", "choice", "type", "tokens", "finish_reason", "end_ns",
    "prompt_tokens", "output_tokens", "token_source", "class", "model", "tenant", "streaming", "n_choices",
    "max_tokens", "consumer_hold_ns", "loop_lag_max_ns", "http_status", "bytes", "labels", "recorded", "journal",
    "own_limits", "external_id", "retry_of", "anchor",
)  # fmt: skip


_BYTES_PER_RECEIPT = 2048  # so many more cost the time of another one
_MAX_SENDERS = 10_000
_MAX_WRITERS = 10_000


class ReceiptRate:
    """Keeps one sender from taking all the time of the control plane. Who is within the rate may send a whole batch;
    what that was too much is waited for.
    """

    def __init__(self, clock: Clock, per_s: int, burst: int) -> None:
        """Receipts that one address may report: so many a second, after so many at once."""
        self._clock = clock
        self._receipt_ns = NS_PER_S // per_s
        self._burst_ns = burst * self._receipt_ns
        self._paid_until_ns: OrderedDict[str, int] = OrderedDict()  # by address, the latest last

    def wait_s(self, sender: str) -> int:
        """Whole seconds until this sender may report again; 0: it may now."""
        over = self._paid_until_ns.get(sender, 0) - self._clock.monotonic_ns() - self._burst_ns
        return -(-over // NS_PER_S) if over > 0 else 0

    def took(self, sender: str, receipts: int, size: int = 0) -> None:
        """`size`: bytes of their body."""
        cost = (receipts + size // _BYTES_PER_RECEIPT) * self._receipt_ns
        paid = max(self._paid_until_ns.pop(sender, 0), self._clock.monotonic_ns())
        self._paid_until_ns[sender] = paid + cost
        if len(self._paid_until_ns) > _MAX_SENDERS:
            self._paid_until_ns.popitem(last=False)


class OwnJournals:
    """Which journal files of clients stand in this events directory. Of the writers that were asked for last, one whose
    file was seen stays known, whatever becomes of its files.
    """

    def __init__(self, events: Path, remembered: int = _MAX_WRITERS) -> None:
        self._directory = events / "journal" / "client"
        self._remembered = remembered
        self._writers: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        path = self._directory / name
        writer = writer_of(path)
        if writer in self._writers:
            self._writers.move_to_end(writer)
            return True
        if not path.exists():
            return False
        self._writers[writer] = None
        if len(self._writers) > self._remembered:
            self._writers.popitem(last=False)
        return True


class ReceiptError(SloscopeError):
    """A receipt that is refused. `cause` is the label under which it is counted."""

    def __init__(self, cause: str, text: str) -> None:
        super().__init__(text)
        assert cause in CAUSES, cause
        self.cause = cause


class Receipts:
    """Takes receipts one by one. The contract's `sloscope_client_*` families and the journal of `client` are here."""

    def __init__(
        self,
        contract: Contract,
        store: MetricStore,
        open_writer: Callable[[], JournalWriter],
        clock: Clock,
        rate: ReceiptRate,
        journals: OwnJournals,
    ) -> None:
        self._contract = contract
        self._store = store
        self._clock = clock
        self._families = ReceiptFamilies(store, "client", contract)
        self._open_writer = open_writer
        self._writer: JournalWriter | None = None
        self._seen: OrderedDict[tuple[str, int, bool], None] = OrderedDict()
        self.rate = rate
        self._journals = journals
        self.lost = 0
        for cause in CAUSES:
            store.init(_REJECTED, (cause,))

    def take(self, receipt: object) -> None:
        """Records and counts one receipt, or a late reason. Raises ReceiptError, and nothing is recorded then."""
        try:
            self._take(receipt)
        except ReceiptError as error:
            self._store.inc(_REJECTED, 1, (error.cause,))
            raise

    def refused_unread(self, cause: str) -> None:
        """One report, read no further: `rate` or `too_large`."""
        self._store.inc(_REJECTED, 1, (cause,))

    def _take(self, receipt: object) -> None:
        if not isinstance(receipt, dict):
            raise ReceiptError("malformed", f"receipt: expected a JSON object, got {type(receipt).__name__}")
        for name in receipt:
            if name not in _FIELDS:
                raise ReceiptError("malformed", f"{str(name)[:40]}: no such field")
        request_id = receipt.get("request_id")
        if not isinstance(request_id, str) or not is_request_id(request_id):
            said = "is missing" if request_id is None else f"{str(request_id)[:40]!r} is not a 26-character ULID"
            raise ReceiptError("request_id", f"request_id: {said}")
        attempt = _int(receipt, "attempt", 0) or 0
        end = _outcome(receipt)
        is_late = "send_ns" not in receipt
        key = (request_id, attempt, is_late)
        if key in self._seen:
            raise ReceiptError("duplicate", f"request_id: {request_id} was reported before")
        if is_late:
            self._late(receipt, request_id, attempt, end)
        else:
            self._whole(receipt, request_id, attempt, end)
        self._seen[key] = None
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)

    def _late(self, receipt: Mapping[str, Any], request_id: str, attempt: int, end: Ended) -> None:
        for name in receipt:
            if name not in _LATE:
                raise ReceiptError("malformed", f"send_ns: is missing beside {name}")
        if end.outcome != "cancelled":
            # Only the reason of a disconnect may be refined: the counters have judged the request already.
            raise ReceiptError("outcome", f"outcome: {end.outcome!r} is no late reason; accepted: cancelled")
        # Nobody outside has a word on what the engine saw.
        _check_observer(receipt, "sidecar", ("client", "sidecar"))
        record = _checked(
            records.make(
                "late",
                request_id=request_id,
                attempt=attempt or None,
                observer=receipt.get("observer", "sidecar"),
                outcome=end.outcome,
                reason=end.reason,
            )
        )
        self._write([record])
        self._store.inc("sloscope_reason_revisions_total")

    def _whole(self, receipt: Mapping[str, Any], request_id: str, attempt: int, end: Ended) -> None:
        _check_observer(receipt, "client", ("client",))
        resolved = self._resolve(receipt)
        _check_labels(receipt.get("labels"))
        _check_texts(receipt)
        send_ns = _int(receipt, "send_ns")
        if send_ns is None:
            raise ReceiptError("malformed", "send_ns: null; accepted: a whole number from 0, below 2^62")
        intended_ns = _int(receipt, "intended_ns")
        if intended_ns is not None and intended_ns > send_ns:
            raise ReceiptError("stamps", f"intended_ns: {intended_ns} is after send_ns, {send_ns}")
        anchor = _anchor(receipt)
        recorded = receipt.get("recorded")
        if recorded is not None and type(recorded) is not bool:  # to `in`, 1 is true and 0.0 false
            raise ReceiptError("malformed", "recorded: accepted: true or false")
        is_recorded = self._is_recorded(receipt)
        n_choices = _int(receipt, "n_choices", 1)
        if n_choices is None or not 1 <= n_choices <= _MAX_CHOICES:
            raise ReceiptError("malformed", f"n_choices: {n_choices}; accepted: 1 to {_MAX_CHOICES}")
        t_ns, choice, types, tokens = _events(receipt, send_ns)
        if not t_ns and end.outcome == "completed" and receipt.get("end_ns") is None:
            # Without it the answer would have taken no time.
            raise ReceiptError("malformed", "end_ns: is missing; a completed answer without t_ns needs it")
        end_ns = _int(receipt, "end_ns", t_ns[-1] if t_ns else send_ns)
        assert end_ns is not None
        if end_ns < (max(t_ns) if t_ns else send_ns):
            raise ReceiptError("stamps", f"end_ns: {end_ns} is before the last receipt or the send")
        streaming = receipt.get("streaming", True)
        clock_id = receipt.get("clock_id")
        begin = _checked(
            records.make(
                "begin",
                request_id=request_id,
                attempt=attempt or None,
                observer="client",
                role="client",
                clock_id=self._clock.clock_id if clock_id is None else clock_id,
                external_id=receipt.get("external_id"),
                retry_of=receipt.get("retry_of"),
                intended_ns=intended_ns,
                send_ns=send_ns,
                model=receipt.get("model"),
                tenant=receipt.get("tenant"),
                class_=resolved.class_name,
                contract_hash=self._contract.hash,
                limits=resolved.limits.as_record(),
                own_limits=dict(resolved.own) or None,
                streaming=streaming,
                n_choices=n_choices,
                max_tokens=_int(receipt, "max_tokens"),
                labels=receipt.get("labels"),
            )
        )
        known = any(count is not None for count in tokens)
        chunks = _checked(
            records.make(
                "chunks",
                request_id=request_id,
                attempt=attempt or None,
                ordinal0=0,
                t_ns=t_ns,
                choice=choice,
                type=types,
                tokens=tokens if known else None,
            )
        )
        total, source = _counted(receipt, len(t_ns))
        finish = _checked(
            records.make(
                "end",
                request_id=request_id,
                attempt=attempt or None,
                outcome=end.outcome,
                reason=end.reason,
                finish_reason=receipt.get("finish_reason"),
                end_ns=end_ns,
                prompt_tokens=_int(receipt, "prompt_tokens"),
                output_tokens=total,
                token_source=source,
                http_status=_int(receipt, "http_status"),
                bytes=_int(receipt, "bytes"),
                loop_lag_max_ns=_int(receipt, "loop_lag_max_ns"),
                consumer_hold_ns=_int(receipt, "consumer_hold_ns"),
            )
        )
        if not is_recorded:
            self._write(self._placed(anchor, [begin, *([chunks] if t_ns else []), finish], end_ns))
        counted = source is not None and source != "assumed_one"
        event_tokens = known_event_tokens(tokens if known else None, len(t_ns), n_choices, total, counted)
        completed_ns = end_ns if end.outcome == "completed" else None
        summary = summarise(send_ns, t_ns, choice, types, n_choices, total, event_tokens, completed_ns)
        if (receipt.get("labels") or {}).get("warmup"):
            return  # excluded by rule, here as in every question
        labels = self._families.begun(resolved.class_name, receipt.get("model") or "", receipt.get("tenant") or "")
        self._families.ended(labels, end, summary, resolved, bool(streaming), t_ns, choice, event_tokens)

    def _is_recorded(self, receipt: Mapping[str, Any]) -> bool:
        """Whether its sender's own records stand in the directory that ours would."""
        journal = receipt.get("journal")
        if journal is not None and not (isinstance(journal, str) and is_journal_name(journal)):
            raise ReceiptError(
                "malformed",
                f"journal: {str(journal)[:40]!r}; accepted: the file name of a journal, BOOT-PID-NS-N.jsonl",
            )
        return receipt.get("recorded") is True and (journal is None or journal in self._journals)

    def _resolve(self, receipt: Mapping[str, Any]) -> Resolved:
        name = receipt.get("class", self._contract.default_class)
        row = self._contract.classes.get(name) if isinstance(name, str) else None
        if row is None:
            accepted = ", ".join(self._contract.classes)
            raise ReceiptError("unknown_class", f"class: {str(name)[:40]!r} is unknown; accepted: {accepted}")
        own = receipt.get("own_limits")
        if own is None:
            own = {}
        if not isinstance(own, dict) or not all(
            name in _OWN_LIMITS and type(ns) is int and 0 < ns < 2**62 for name, ns in own.items()
        ):
            raise ReceiptError("malformed", "own_limits: accepted: an object of limit fields and whole ns above 0")
        return Resolved(row.name, row.limits.overridden(own), own, known=True)

    def _placed(self, anchor: dict[str, int] | None, written: list[Record], end_ns: int) -> list[Record]:
        """With the clock anchor that places foreign stamps on the wall: the one reported, else `end_ns` is now. So it
        is, too, if by the one reported the request is yet to end, or ended longer ago than a report can be late: a
        page's clock may be set to anything, and one request of 1970 would stretch every window to there.
        """
        now = records.make(
            "clock",
            mono_ns=self._clock.monotonic_ns(),
            wall_ns=self._clock.wall_ns(),
            clock_id=self._clock.clock_id,
        )
        clock_id = written[0]["clock_id"]
        if clock_id == self._clock.clock_id:
            return written
        just_now = {"mono_ns": end_ns, "wall_ns": now["wall_ns"]}
        anchor = anchor or just_now
        late_ns = now["wall_ns"] - (anchor["wall_ns"] + end_ns - anchor["mono_ns"])
        if not 0 <= late_ns <= _MOST_LATE_NS:
            anchor = just_now
        foreign = _checked(records.make("clock", clock_id=clock_id, **anchor))
        return [foreign, *written, now]

    def _write(self, written: list[Record]) -> None:
        """One write(2) for all. A disk that refuses loses the record, counted, and not the metrics."""
        try:
            if self._writer is None:
                self._writer = self._open_writer()
            for record in written:
                self._writer.append(record)
            self._writer.flush()
        except SloscopeError:
            self.lost += len(written)

    def count_journal(self) -> None:
        """Puts the journal's own numbers into the store."""
        writer, labels = self._writer, ("client",)
        self._store.set("sloscope_journal_records_total", writer.written if writer else 0, labels)
        self._store.set("sloscope_journal_dropped_total", (writer.lost if writer else 0) + self.lost, labels)
        self._store.set("sloscope_journal_bytes_total", writer.bytes if writer else 0, labels)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _check_observer(receipt: Mapping[str, Any], default: str, accepted: tuple[str, ...]) -> None:
    observer = receipt.get("observer", default)
    if observer not in accepted:
        raise ReceiptError("malformed", f"observer: {str(observer)[:40]!r}; accepted: {', '.join(accepted)}")


def _counted(receipt: Mapping[str, Any], events: int) -> tuple[int | None, Any]:
    """Output tokens and where their number is from, both or neither. Whether the source is one is the record's
    business.
    """
    total, source = _int(receipt, "output_tokens"), receipt.get("token_source")
    if total is not None:
        if source is None:
            raise ReceiptError(
                "malformed", f"token_source: is missing beside output_tokens; accepted: {', '.join(TOKEN_SOURCES)}"
            )
        return total, source
    if source not in (None, "assumed_one"):
        raise ReceiptError("malformed", f"token_source: {str(source)[:40]!r} without output_tokens")
    return (events, "assumed_one") if events else (None, None)


def _anchor(receipt: Mapping[str, Any]) -> dict[str, int] | None:
    anchor = receipt.get("anchor")
    if anchor is None:
        return None
    if not isinstance(anchor, dict) or set(anchor) != {"mono_ns", "wall_ns"}:
        raise ReceiptError("malformed", "anchor: accepted: an object of mono_ns and wall_ns")
    for name in anchor:
        if _int(anchor, name) is None:
            raise ReceiptError("malformed", f"anchor: {name}: null; accepted: a whole number from 0, below 2^62")
    return anchor


def _check_labels(labels: object) -> None:
    """Their types are the record's business."""
    if isinstance(labels, dict) and not records.labels_fit(labels):
        raise ReceiptError(
            "malformed",
            f"labels: accepted: at most {MAX_LABELS}, names and texts of at most {MAX_LABEL_TEXT} characters",
        )


def _check_texts(receipt: Mapping[str, Any]) -> None:
    """A long one may be what was said, so it is counted and not repeated. Their types are the record's business."""
    for name in ("model", "tenant", "external_id", "clock_id"):
        text = receipt.get(name)
        if isinstance(text, str) and len(text) > MAX_NAME:
            raise ReceiptError("malformed", f"{name}: {len(text)} characters; accepted: at most {MAX_NAME}")
    if receipt.get("clock_id") == "":
        raise ReceiptError("malformed", "clock_id: ''; accepted: the name of a clock")
    retried = receipt.get("retry_of")
    if isinstance(retried, str) and not is_request_id(retried):
        raise ReceiptError("malformed", f"retry_of: {len(retried)} characters that are no 26-character ULID")
    reasons = receipt.get("finish_reason")
    if not isinstance(reasons, list):
        return
    if len(reasons) > _MAX_CHOICES:
        raise ReceiptError("malformed", f"finish_reason: {len(reasons)} texts; accepted: at most {_MAX_CHOICES}")
    longest = max((len(text) for text in reasons if isinstance(text, str)), default=0)
    if longest > _MAX_REASON:
        raise ReceiptError(
            "malformed", f"finish_reason: {longest} characters; accepted: at most {_MAX_REASON} for each choice"
        )


def _checked(record: Record) -> Record:
    try:
        return records.check(record)
    except RecordError as error:
        _, _, text = str(error).partition(".")  # without the kind of record, which the caller did not write
        raise ReceiptError("malformed", text or str(error)) from None


def _int(receipt: Mapping[str, Any], name: str, default: int | None = None) -> int | None:
    value = receipt.get(name)
    if value is None:
        return default
    if type(value) is not int or not 0 <= value < _MAX_NS:
        raise ReceiptError("malformed", f"{name}: {str(value)[:40]!r}; accepted: a whole number from 0, below 2^62")
    if name.endswith("tokens") and value > MAX_TOKENS:
        raise ReceiptError("malformed", f"{name}: {value}; accepted: at most {MAX_TOKENS}")
    return value


def _outcome(receipt: Mapping[str, Any]) -> Ended:
    outcome, reason = receipt.get("outcome"), receipt.get("reason", "")
    reasons = OUTCOMES.get(outcome) if isinstance(outcome, str) else None
    if reasons is None:
        raise ReceiptError(
            "outcome", f"outcome: {str(outcome)[:40]!r} is not accepted; accepted: {', '.join(OUTCOMES)}"
        )
    if reason not in reasons:
        named = ", ".join(each or "(empty)" for each in reasons)
        raise ReceiptError("outcome", f"reason: {str(reason)[:40]!r} does not go with {outcome}; accepted: {named}")
    assert isinstance(outcome, str)
    return Ended(outcome, reason)


def _events(receipt: Mapping[str, Any], send_ns: int) -> tuple[list[int], list[int], list[int], list[int | None]]:
    t_ns = _ints(receipt, "t_ns", [])
    if len(t_ns) > _MAX_EVENTS:
        raise ReceiptError("too_large", f"t_ns: {len(t_ns)} events; accepted: at most {_MAX_EVENTS}")
    choice = _ints(receipt, "choice", [0] * len(t_ns))
    kinds = receipt.get("type", [0] * len(t_ns))
    tokens = receipt.get("tokens", [None] * len(t_ns))
    if not isinstance(kinds, list) or not isinstance(tokens, list):
        raise ReceiptError("malformed", "type and tokens: accepted: lists")
    for name, values in (("choice", choice), ("type", kinds), ("tokens", tokens)):
        if len(values) != len(t_ns):
            raise ReceiptError("malformed", f"{name}: {len(values)} values for {len(t_ns)} events")
    types: list[int] = []
    for kind in kinds:
        place = OUTPUT_TYPES.index(kind) if kind in OUTPUT_TYPES else kind
        if type(place) is not int or not 0 <= place < len(OUTPUT_TYPES):
            raise ReceiptError("malformed", f"type: {str(kind)[:40]!r}; accepted: {', '.join(OUTPUT_TYPES)} or 0 to 2")
        types.append(place)
    if any(count is not None and (type(count) is not int or not 0 <= count <= MAX_TOKENS) for count in tokens):
        raise ReceiptError("malformed", f"tokens: accepted: whole numbers, 0 to {MAX_TOKENS}, or null")
    if any(not 0 <= index < _MAX_CHOICES for index in choice):
        raise ReceiptError("malformed", f"choice: accepted: 0 to {_MAX_CHOICES - 1}")
    _check_order(t_ns, choice, send_ns)
    return t_ns, choice, types, tokens


def _ints(receipt: Mapping[str, Any], name: str, default: list[int]) -> list[int]:
    values = receipt.get(name, default)
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < _MAX_NS for value in values):
        raise ReceiptError("malformed", f"{name}: accepted: a list of whole numbers from 0, below 2^62")
    return values


def _check_order(t_ns: list[int], choice: list[int], send_ns: int) -> None:
    last: dict[int, int] = {}
    for stamp, index in zip(t_ns, choice, strict=True):
        if stamp < last.get(index, send_ns):
            what = "goes backwards" if index in last else "is before send_ns"
            raise ReceiptError("stamps", f"t_ns: {stamp} of choice {index} {what}")
        last[index] = stamp
