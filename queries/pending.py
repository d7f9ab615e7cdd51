"""Requests that a pass cannot finish: kept for the next one, or ended where their recorder is dead."""

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from queries.batches import Batch
from queries.histories import Request
from queries.intake import Intake, Line, Problems, read_lines
from sloscope.errors import JournalError
from sloscope.journal import Manifest
from sloscope.recovery import Lost, write_ends


def load_pending(events: Path, manifest: Manifest, problems: Problems) -> dict[str, Request]:
    """The requests that earlier passes did not finish, read again from their journal lines."""
    name = manifest.state.get("pending")
    if not name:
        return {}
    requests = {}
    try:
        text = (events / name).read_text()
        for line in text.splitlines():
            body = json.loads(line)
            flat = [(journal, list(zip(*[iter(spans)] * 3, strict=True))) for journal, spans in body["sources"]]
            requests[body["request_id"]] = reread(events, body["request_id"], flat, problems)
    except (OSError, ValueError, KeyError) as error:
        raise JournalError(f"pending file {name!r}: damaged ({error})") from None
    return requests


def reread(
    events: Path, request_id: str, sources: Iterable[tuple[str, list[tuple[int, int, int]]]], problems: Problems
) -> Request:
    """A request from its journal lines. Two passes over the same lines give the same request."""
    request = Request(request_id)
    for journal, spans in sorted(sources):
        try:
            for line in read_lines(events, journal, spans):
                request.add(line)
        except FileNotFoundError:
            problems.add(f"{journal}: is gone, but request {request_id} still needs it")
    return request


def pending_text(requests: Iterable[Request]) -> bytes:
    lines = [
        json.dumps(
            {"request_id": request.request_id, "sources": [[j, s.tolist()] for j, s in request.sources.items()]},
            separators=(",", ":"),
        )
        for request in requests
    ]
    return "".join(f"{line}\n" for line in lines).encode()


def feed(requests: dict[str, Request], line: Line) -> None:
    record = line.record
    request_id = record.request_id if isinstance(record, Batch) else record.get("request_id")
    if request_id is not None:
        request = requests.get(request_id)
        if request is None:
            request = requests[request_id] = Request(request_id)
        request.add(line)


def close_lost(events: Path, requests: Iterable[Request], intake: Intake) -> int:
    """Writes the ends that dead recorders owe. Needs the directory's lock. Returns how many.

    Whether a recorder was dead was asked before its journal was read, so whatever it had to say is known.
    """
    dead = intake.dead_writers
    owed: dict[str, list[Lost]] = defaultdict(list)
    for request in requests:
        for observer, attempt, writer, side in request.open_sides():
            if writer in dead:
                owed[observer].append(Lost(writer, request.request_id, attempt, side.last_stamp_ns))
    anchors = intake.last_anchors
    return sum(write_ends(events, observer, lost, anchors) for observer, lost in sorted(owed.items()))
