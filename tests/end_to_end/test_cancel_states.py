"""A thousand clients that leave at whatever moment: nothing is left behind, and every book says the same."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from sloscope.demo.processes import ask
from sloscope.ids import new_request_id
from sloscope.records import Record
from tests.end_to_end.support import Follower
from tests.reference_server.serving import WAYS_TO_LEAVE, Conversation, Served, leave, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
CANCELS = 1000
CLIENTS = 1100  # some have their whole answer before they leave
AT_ONCE = 32
SEED = 20261130
# When to leave: at once, in a state of the engine's, after some tokens, or when the last is on its way.
MOMENTS = ("at_once", "WAITING", "PREFILL", "DECODE", "PAUSED", "first_token", "some_tokens", "last_token")
PREEMPTED_CLIENTS = 30
ENDED, CLEANUP = "sloscope_engine_requests_ended_total{", "sloscope_engine_cancel_cleanup_seconds"


class States:
    """The state of each request as the engine's journal says, read while it is written."""

    def __init__(self, events: Path) -> None:
        self._follower = Follower(events)
        self._states: dict[str, str] = {}
        self._changed = threading.Condition()
        self._over = threading.Event()

    def _follow(self) -> None:
        while not self._over.wait(0.005):
            new = {r["request_id"]: r["to_state"] for r in self._follower.read() if r["kind"] == "state"}
            with self._changed:
                self._states |= new
                self._changed.notify_all()

    def wait_for(self, request_id: str, state: str) -> None:
        """Until it is in that state or past it."""
        order = ("WAITING", "PREFILL", "DECODE", "PAUSED", "PREEMPTED")
        wanted = {*order[order.index(state) :], "FINISHED", "CANCELLED", "REJECTED"}
        with self._changed:
            assert self._changed.wait_for(lambda: self._states.get(request_id) in wanted, 60), (request_id, state)

    @contextmanager
    def followed(self) -> Iterator[None]:
        thread = threading.Thread(target=self._follow)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()


def leave_at(served: Served, states: States, random: Random, moment: str) -> str:
    request_id = new_request_id()
    stream = moment in ("PAUSED", "first_token", "some_tokens", "last_token") or random.random() < 0.5
    tokens = {"last_token": random.randrange(2, 12), "PREEMPTED": 200}.get(moment, 400)
    prompt = [random.randrange(100, 200) for _ in range(random.randrange(300, 600) if moment == "PREFILL" else 8)]
    body = {"model": "builtin", "prompt": prompt, "max_tokens": tokens, "stream": stream}
    headers = {"x-sloscope-request-id": request_id}
    talk = Conversation(served.port, body, headers, receive_buffer=2048 if moment == "PAUSED" else 0)
    if moment.isupper():
        states.wait_for(request_id, moment)
        time.sleep(random.random() / 100)
    elif moment != "at_once":
        talk.read_head()
        wanted = {"first_token": 1, "last_token": tokens - 1}.get(moment) or random.randrange(1, 30)
        for _ in islice(talk.events(), wanted):
            pass
    how = random.choice(WAYS_TO_LEAVE)
    with suppress(OSError):  # the server may have ended it first
        leave(talk.socket, how)
        while how == "half-close" and talk.socket.recv(1 << 16):
            pass  # until the server has drawn its conclusion
    talk.close()
    return request_id


def buckets(metrics: dict[str, float], name: str) -> list[tuple[str, int]]:
    """(upper edge, samples in the bucket) where there are any."""
    cumulated = [
        (key.split('le="')[1].split('"')[0], n) for key, n in metrics.items() if key.startswith(name + "_bucket")
    ]
    counts, below = [], 0.0
    for edge, n in cumulated:
        counts.append((edge, round(n - below)))
        below = n
    return [(edge, n) for edge, n in counts if n]


def run_clients(served: Served, jobs: Sequence[tuple[Random, str]], at_once: int) -> list[str]:
    """Their request ids, when all have ended."""
    states = States(served.events)
    with states.followed(), ThreadPoolExecutor(at_once) as pool:
        ids = list(pool.map(lambda job: leave_at(served, states, *job), jobs))
    until(lambda: sum(n for key, n in served.metrics().items() if key.startswith(ENDED)) == len(ids), 60)
    return ids


def metrics_at_rest(served: Served, before: dict[str, float]) -> dict[str, float]:
    """When nothing is left behind, compared with before the clients came."""
    idle = ("sloscope_engine_kv_blocks", "sloscope_engine_requests{", "sloscope_engine_undelivered")
    at_rest = {key: n for key, n in before.items() if key.startswith(idle)}
    assert at_rest['sloscope_engine_kv_blocks{kind="free"}'] > 0
    until(lambda: at_rest.items() <= served.metrics().items())
    return served.metrics()


class Books(NamedTuple):
    outcomes: Counter[str]
    left_from: Counter[str]  # cancelled in the engine, by the state before
    cleanups_ns: list[int]  # one for each of them that held KV, sorted


def check_books(journal: Sequence[Record], metrics: dict[str, float], ids: Sequence[str]) -> Books:
    """Journal and metrics agree, and whoever came has ended once."""
    of_kind: dict[str, list[Any]] = {kind: [] for kind in ("begin", "end", "state", "late", "step")}
    for record in journal:
        if record["kind"] in of_kind:
            of_kind[record["kind"]].append(record)
    # Offered: each began once and ended once; nothing is in flight any more.
    offered, over = (sorted(r["request_id"] for r in of_kind[kind]) for kind in ("begin", "end"))
    assert offered == over == sorted(ids)
    outcomes = Counter(r["outcome"] for r in of_kind["end"])
    assert outcomes == {outcome: metrics[f'{ENDED}outcome="{outcome}"}}'] for outcome in outcomes}
    assert outcomes.keys() <= {"cancelled", "completed"}
    assert {r["reason"] for r in of_kind["end"] if r["outcome"] == "cancelled"} == {"disconnect"}
    # In the engine: from arrival to exactly one end.
    moves = of_kind["state"]
    arrived = sorted(r["request_id"] for r in moves if r["to_state"] == "WAITING" and "from_state" not in r)
    over = sorted(r["request_id"] for r in moves if r["to_state"] in ("FINISHED", "CANCELLED"))
    assert arrived == over and set(arrived) <= set(ids) and len(set(arrived)) == len(arrived)
    cancelled = {r["request_id"]: r for r in moves if r["to_state"] == "CANCELLED"}
    # Every abort that the engine saw has its stamp and no step after it; one that held KV a second stamp and a sample.
    aborts = {r["request_id"]: r for r in of_kind["late"] if "abort_seen_ns" in r}
    closed = {r["request_id"]: r["socket_closed_ns"] for r in of_kind["late"] if "socket_closed_ns" in r}
    assert aborts.keys() == cancelled.keys()
    assert closed.keys() == {r["request_id"] for r in of_kind["end"] if r["outcome"] == "cancelled"}
    for request_id, abort in aborts.items():
        assert closed[request_id] < abort["abort_seen_ns"]
        if cancelled[request_id]["from_state"] in ("WAITING", "PREEMPTED"):
            assert "kv_freed_ns" not in abort
        else:
            assert abort["abort_seen_ns"] <= abort["kv_freed_ns"]
        assert cancelled[request_id]["at_ns"] == abort["abort_seen_ns"]
    for step in of_kind["step"]:
        assert not any(
            i in aborts and step["start_ns"] > aborts[i]["abort_seen_ns"]
            for i in step["decode_ids"] + step["prefill_ids"]
        )
    freed = [abort for abort in aborts.values() if "kv_freed_ns" in abort]
    cleanups_ns = sorted(abort["kv_freed_ns"] - abort["abort_seen_ns"] for abort in freed)
    assert metrics[f"{CLEANUP}_count"] == len(freed)
    assert metrics[f"{CLEANUP}_sum"] == pytest.approx(sum(cleanups_ns) / 1e9, rel=1e-6)
    return Books(outcomes, Counter(r["from_state"] for r in cancelled.values()), cleanups_ns)


def test_a_thousand_cancels_at_random_states_leave_nothing_behind(tmp_path: Path) -> None:
    served = Served(
        tmp_path, "--max-batch", "8", "--max-waiting", "1000", "--prefill-tokens", "32", "--max-undelivered", "32",
        "--slow-reader-after", "120s", "--send-buffer", "4096",
    )  # fmt: skip
    before, random = served.metrics(), Random(SEED)
    began = time.monotonic()
    jobs = [(Random(random.random()), random.choice(MOMENTS)) for _ in range(CLIENTS)]
    ids = run_clients(served, jobs, AT_ONCE)
    took_s = time.monotonic() - began
    metrics = metrics_at_rest(served, before)
    assert served.stop() == 0
    outcomes, left_from, cleanups_ns = check_books(served.journal(), metrics, ids)
    assert outcomes["cancelled"] >= CANCELS
    assert all(left_from[state] >= CANCELS / 50 for state in ("WAITING", "PREFILL", "DECODE", "PAUSED")), left_from

    asked = ["cancel_cleanup", "--events", str(served.events), "--goodput", "ttft:300", "--observer", "engine"]
    rows = json.loads(ask("query", *asked, "--format", "json"))
    print(f"\n{CLIENTS} clients in {took_s:.0f} s, seed {SEED}; ended {dict(outcomes)}")
    print("cancelled in the engine from", dict(left_from))
    print("cleanup, seconds at most: requests:", buckets(metrics, CLEANUP))
    for row in rows:
        print(row)
    to_abort, to_free, whole = rows
    aborts, freed = left_from.total(), len(cleanups_ns)
    assert to_abort["n"] == aborts and to_free["n"] == whole["n"] == freed == aborts - left_from["WAITING"]
    assert [row["negative"] for row in rows] == [0, 0, 0]
    # Who left before the engine knew of it, or after it had ended there, has no abort, and none is missing.
    assert to_abort["cancelled"] == outcomes["cancelled"]
    assert to_abort["not_running"] == outcomes["cancelled"] - aborts
    assert [row["unfinished"] for row in rows] == [0, 0, 0]
    assert to_free["max_s"] == cleanups_ns[-1] / 1e9
    assert to_free["p50_s"] == cleanups_ns[(50 * freed + 99) // 100 - 1] / 1e9  # nearest rank


def test_cancels_of_preempted_requests_leave_nothing_behind(tmp_path: Path) -> None:
    # Four of 13 blocks in the end (8 + 200 tokens), and 16 are there: whoever came last gives its KV back, and gets it
    # again only when another one has ended.
    served = Served(
        tmp_path, "--max-batch", "4", "--reservation", "optimistic", "--kv-blocks", "16", "--block-tokens", "16"
    )
    before, random = served.metrics(), Random(SEED)
    ids = run_clients(served, [(Random(random.random()), "PREEMPTED") for _ in range(PREEMPTED_CLIENTS)], 8)
    metrics = metrics_at_rest(served, before)
    assert served.stop() == 0
    outcomes, left_from, _ = check_books(served.journal(), metrics, ids)
    print(f"\n{len(ids)} clients, seed {SEED}; ended {dict(outcomes)}; cancelled from {dict(left_from)}")
    assert left_from["PREEMPTED"] >= PREEMPTED_CLIENTS / 5, left_from
