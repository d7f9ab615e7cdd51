"""A reader that does not read pauses itself alone, and an answer that nobody will read is not computed."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median

import pytest

from reference_server.engine_process import EngineConfig
from sloscope.ids import new_request_id
from sloscope.records import Record
from tests.end_to_end.support import Follower
from tests.reference_server.serving import WAYS_TO_LEAVE, Conversation, Served, leave, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
READERS = 8
TOKENS = 300
# Who is behind because a busy machine holds up the front end is behind by less: only who does not read pauses.
WINDOW = EngineConfig("builtin").max_undelivered
PATIENCE_S = 3
# The step that runs when the socket closes was begun before. The front end sends the abort when it sees the close, and
# the engine reads its inbox before each step: one more step begins only when that read came just before the abort.
STEPS_AFTER_CLOSE = 1


def read_all(served: Served, tokens: int) -> list[str]:
    """Readers that take every token as it comes; their request ids."""
    ids = [new_request_id() for _ in range(READERS)]

    def read(request_id: str) -> int:
        events = served.stream({"x-sloscope-request-id": request_id}, max_tokens=tokens).whole()
        return sum(bool(event.text) for event in events)

    with ThreadPoolExecutor(READERS) as pool:
        assert list(pool.map(read, ids)) == [tokens] * READERS
    return ids


class Run:
    """What the journal says of some requests: their tokens and the steps that ran them."""

    def __init__(self, journal: Sequence[Record], ids: Sequence[str]) -> None:
        self.ids = set(ids)
        self.steps = [r for r in journal if r["kind"] == "step" and self.ids & set(r["decode_ids"] + r["prefill_ids"])]
        self.emits = [r for r in journal if r["kind"] == "emit" and r["request_id"] in self.ids]

    def largest_gap_ns(self) -> int:
        return max(b - a for i in self.ids for a, b in pairwise(self._computed_ns(i)))

    def _computed_ns(self, request_id: str) -> list[int]:
        return [ns for record in self.emits if record["request_id"] == request_id for ns in record["computed_ns"]]

    def median_step_ns(self) -> float:
        return median(step["end_ns"] - step["start_ns"] for step in self.steps)

    def check_steps(self, journal: Sequence[Record]) -> None:
        """Each request has its tokens from steps that follow each other: it was in every one that ran, and none made
        no token for it."""
        ran = sorted(r["step_id"] for r in journal if r["kind"] == "step")
        assert ran == list(range(ran[0], ran[-1] + 1)), "a step is not in the journal"
        for request_id in self.ids:
            in_batch = [r["step_id"] for r in self.steps if request_id in r["decode_ids"] + r["prefill_ids"]]
            made = [step_id for r in self.emits if r["request_id"] == request_id for step_id in r["step_id"]]
            assert made == list(range(made[0], made[0] + TOKENS)), f"{request_id}: a step left it out"
            assert in_batch == made, f"{request_id}: it ran and has no token of it"

    def __str__(self) -> str:
        gap, step = self.largest_gap_ns() / 1e6, self.median_step_ns() / 1e6
        return f"largest gap {gap:.1f} ms, median step {step:.2f} ms, {gap / step:.1f} times"


def test_a_client_that_never_reads_pauses_only_itself_and_is_cut(tmp_path: Path) -> None:
    served = Served(tmp_path, "--slow-reader-after", f"{PATIENCE_S}s")  # window and buffers as they are by default
    resident, reserved, free = (
        f'sloscope_engine_kv_blocks{{kind="{kind}"}}' for kind in ("resident", "reserved", "free")
    )
    before = served.metrics()
    alone = read_all(served, TOKENS)

    slow_id = new_request_id()
    body = {"model": "builtin", "prompt": "the river", "max_tokens": 4000, "stream": True}
    slow = Conversation(served.port, body, {"x-sloscope-request-id": slow_id})
    paused = until(lambda: (m := served.metrics())['sloscope_engine_requests{state="PAUSED"}'] == 1 and m, 60)
    # 4 prompt tokens and 4000 more are 126 blocks of 32, promised in full and kept while it pauses.
    assert paused[resident] + paused[reserved] == 126 == before[free] - paused[free]
    assert paused["sloscope_engine_kv_blocks_paused"] == paused[resident] > 0
    assert WINDOW <= paused["sloscope_engine_undelivered_tokens"] < 4000

    beside: list[str] = []
    while not served.records("end", slow_id):
        beside += read_all(served, TOKENS)
    (end,) = served.records("end", slow_id)
    assert (end["outcome"], end["reason"]) == ("cancelled", "slow_reader")
    until(lambda: served.metrics()[free] == before[free], 60)
    after = served.metrics()
    assert after["sloscope_engine_kv_blocks_paused"] == after["sloscope_engine_undelivered_tokens"] == 0
    assert after['sloscope_engine_pause_seconds_count{end="slow_reader"}'] == 1
    slow.close()
    assert served.stop() == 0

    journal = served.journal()
    states = [r for r in journal if r["kind"] == "state"]
    moves = [(r["to_state"], r["reason"], r["at_ns"]) for r in states if r["request_id"] == slow_id]
    assert [move[:2] for move in moves[2:]] == [
        ("DECODE", "first_token"), ("PAUSED", "flow_control"), ("CANCELLED", "slow_reader"),
    ]  # fmt: skip
    paused_ns, cut_ns = moves[3][2], moves[4][2]
    assert cut_ns - paused_ns >= PATIENCE_S * 1_000_000_000
    meanwhile = [r for r in journal if r["kind"] == "step" and paused_ns <= r["start_ns"] < cut_ns]
    assert all(slow_id not in r["decode_ids"] and r["paused_ids"] == [slow_id] for r in meanwhile)
    assert sum(bool(set(beside) & set(r["decode_ids"])) for r in meanwhile) > 10
    others = {*alone, *beside}
    assert not any(r["to_state"] == "PAUSED" for r in states if r["request_id"] in others)

    control, run = Run(journal, alone), Run(journal, beside)
    print(f"\nwithout a slow reader: {control}\nbeside one:            {run}")
    for each in (control, run):
        each.check_steps(journal)


def test_answers_that_are_sent_as_a_whole_stop_when_their_client_leaves(tmp_path: Path) -> None:
    seed = 20261130
    random = Random(seed)
    served = Served(tmp_path, "--max-batch", "8")
    follower = Follower(served.events)
    running: set[str] = set()
    ids: list[str] = []

    def all_run(wanted: set[str]) -> bool:
        for record in follower.read():
            if record["kind"] == "step":
                running.update(record["decode_ids"])
        return wanted <= running

    for _ in range(3):
        group = {new_request_id(): random.choice(WAYS_TO_LEAVE) for _ in range(8)}
        talks = {i: served.stream({"x-sloscope-request-id": i}, max_tokens=4000, stream=False) for i in group}
        until(lambda wanted=set(group): all_run(wanted), 60)
        for request_id, how in group.items():
            leave(talks[request_id].socket, how)
        for request_id in group:
            end = served.wait_for_end(request_id, 60)
            assert (end["outcome"], end["reason"], end["output_tokens"]) == ("cancelled", "disconnect", 0), seed
            talks[request_id].close()
        ids += group
    until(lambda: served.metrics()["sloscope_engine_cancel_cleanup_seconds_count"] == len(ids))
    assert served.stop() == 0

    journal = served.journal()
    steps = [r for r in journal if r["kind"] == "step"]
    late: dict[str, dict[str, int]] = {i: {} for i in ids}
    for record in journal:
        if record["kind"] == "late":
            late[record["request_id"]] |= record
    ran_on = []
    for request_id, stamps in late.items():
        assert stamps["socket_closed_ns"] < stamps["abort_seen_ns"] <= stamps["kv_freed_ns"]
        own = [step["start_ns"] for step in steps if request_id in step["decode_ids"]]
        assert not any(start_ns > stamps["abort_seen_ns"] for start_ns in own)
        ran_on.append(sum(start_ns > stamps["socket_closed_ns"] for start_ns in own))
    print(f"\nsteps begun after the socket was closed, of {len(ran_on)} answers: {sum(ran_on)}, at most {max(ran_on)}")
    assert max(ran_on) <= STEPS_AFTER_CLOSE, f"seed {seed}"
