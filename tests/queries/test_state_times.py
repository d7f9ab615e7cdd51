"""The question about states and the engine's own table of transitions agree on what is legal."""

import itertools

from reference_server.request import TRANSITIONS, State
from sloscope import contract as contracts
from tests.queries.cases import session_over


def test_the_question_calls_illegal_exactly_what_the_engine_does() -> None:
    pairs = [(before, after) for before, after in itertools.product((None, *State), State)]
    requests, states = [], []
    for number, (before, after) in enumerate(pairs):
        key = f"request-{number:03d}"
        requests.append({"request_id": key, "class": key, "arrival_at_ns": 0, "warmup": False, "client_observed": True})
        if before is not None:
            # How it came into `before` does not matter here: only the way out of it is looked at.
            states.append({"request_id": key, "engine_id": "e", "at_ns": 0, "to_state": before})
        states.append({"request_id": key, "engine_id": "e", "at_ns": 1, "from_state": before, "to_state": after})
    rows = {"requests": requests, "states": states}
    with session_over(rows, contracts.preset("exercise"), window=(0, 1)) as session:
        found = session.run("state_times").rows
    illegal = {
        pairs[int(row["class"].removeprefix("request-"))]: row["illegal"] == 1
        for row in found
        if row["next_state"] not in ("any", "open")
        and row["state"] == (pairs[int(row["class"].removeprefix("request-"))][0] or "arrival")
    }
    assert illegal == {(before, after): after not in TRANSITIONS[before] for before, after in pairs}
