"""Request histories written to an events directory as the recorders would write them.

Every stamp is given by the caller, on the clock of the writer.
"""

from collections.abc import Sequence
from typing import Any

from sloscope import records
from sloscope.ids import new_request_id
from sloscope.journal import JournalWriter

MS = 1_000_000
SECOND = 1_000_000_000


def new_id(number: int) -> str:
    """The same id for the same number, in the order of the numbers."""
    return new_request_id(1_700_000_000_000_000_000 + number * MS, number.to_bytes(10, "big"))


def write_request(
    writer: JournalWriter,
    observer: str,
    request_id: str,
    start_ns: int,
    stamps: Sequence[int] = (),
    *,
    clock_id: str = "fake:0:0",
    choice: Sequence[int] | None = None,
    types: Sequence[int] | None = None,
    tokens: Sequence[int | None] | None = None,
    forwarded_ns: Sequence[int] | None = None,
    handed_ns: Sequence[int] | None = None,
    written_ns: Sequence[int] | None = None,
    begin: dict[str, Any] | None = None,
    end: dict[str, Any] | None = None,
    end_ns: int | None = None,
    ended: bool = True,
    batch: int = 50,
    attempt: int | None = None,
) -> None:
    """begin, batches of events and, unless `ended` is False, an end: completed at the last stamp by default.

    For the engine `stamps` are `computed_ns` and `tokens` are cumulative per choice (default: one an event).
    """
    start = "send_ns" if observer == "client" else "arrived_ns"
    key = {"request_id": request_id, "attempt": attempt}
    head = {"observer": observer, "clock_id": clock_id, start: start_ns, **(begin or {})}
    writer.write(records.make("begin", **key, **head))
    choice = [0] * len(stamps) if choice is None else list(choice)
    if observer == "engine" and tokens is None:
        tokens = [choice[: position + 1].count(index) for position, index in enumerate(choice)]
    for first in range(0, len(stamps), batch):
        part = slice(first, first + batch)
        if observer == "engine":
            assert tokens is not None
            fields: dict[str, Any] = {
                "computed_ns": list(stamps[part]),
                "cum_tokens": list(tokens[part]),
                "handed_ns": None if handed_ns is None else list(handed_ns[part]),
                "written_ns": None if written_ns is None else list(written_ns[part]),
            }
        else:
            fields = {
                "t_ns": list(stamps[part]),
                "type": [0] * len(stamps[part]) if types is None else list(types[part]),
                "tokens": None if tokens is None else list(tokens[part]),
                "forwarded_ns": None if forwarded_ns is None else list(forwarded_ns[part]),
            }
        kind = "emit" if observer == "engine" else "chunks"
        writer.write(records.make(kind, **key, ordinal0=first, choice=choice[part], **fields))
    if ended:
        last = end_ns if end_ns is not None else max([start_ns, *stamps])
        said = {"outcome": "completed", "reason": "", "end_ns": last, **(end or {})}
        writer.write(records.make("end", **key, **said))
