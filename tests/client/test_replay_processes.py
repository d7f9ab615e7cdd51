"""One schedule over several processes: sent as a whole, at one t0, with one report."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sloscope.client.replay import Replay, Tally
from sloscope.client.replay_processes import processes_for
from sloscope.client.replay_report import invalid_reason, outgrown, report
from sloscope.client.schedule import Plan, build
from sloscope.client.traces import TraceRow, load
from sloscope.journal import journal_files
from tests.client.conftest import Records
from tests.client.sse_server import SseServer, tokens
from tests.client.test_replay import CONTRACT, MS, S, constant, run
from tests.command import Done, sloscope

pytestmark = pytest.mark.e2e  # several interpreters each
GOODPUT = ["--goodput", "ttft:2000 itl_max:1000"]
FORTY = "synthetic:constant?n=40&rate=50&output_p50=4&output_sigma=0"


def replayed(trace: str, events: Path, *arguments: str) -> Done:
    return sloscope("replay", trace, "--events", str(events), *GOODPUT, "--format", "json", *arguments)


def started(trace: str, events: Path, url: str, processes: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "sloscope", "replay", trace, "--url", url, "--events", str(events), *GOODPUT]
    return subprocess.Popen(
        [*command, "--format", "json", "--processes", str(processes)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def children(pid: int) -> list[int]:
    """Members of the crew; multiprocessing keeps a tracker of resources beside them."""
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [child for child in found if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def test_two_processes_send_the_schedule_of_one(tmp_path: Path, recorded: Callable[[Path], Records]) -> None:
    with SseServer(tokens(4)) as server:
        one = replayed(FORTY, tmp_path / "one", "--url", server.url)
        two = replayed(FORTY, tmp_path / "two", "--url", server.url, "--processes", "2")
    assert one.returncode == two.returncode == 0, two.stderr
    assert "from 2 processes" in two.stderr
    (alone,), (shared,) = json.loads(one.stdout), json.loads(two.stdout)
    assert (alone["processes"], shared["processes"]) == (1, 2)
    for name in ("scheduled", "sent", "offered", "completed", "qualified", "attainment", "output_tokens", "valid"):
        assert shared[name] == alone[name], name
    assert len(journal_files(tmp_path / "one")) == 1 and len(journal_files(tmp_path / "two")) == 2
    prompts = []
    for part in ("one", "two"):
        begins = recorded(tmp_path / part)["begin"]
        first = min(begin["intended_ns"] for begin in begins)
        prompts.append(sorted((b["intended_ns"] - first, b["prompt_tokens"], b["max_tokens"]) for b in begins))
    # The same requests at the same times after one t0, though two processes set them.
    assert prompts[0] == prompts[1] and [at for at, _, _ in prompts[1]] == [n * 20 * MS for n in range(40)]


def test_ctrl_c_in_the_terminals_group_stops_all_and_keeps_everything(
    tmp_path: Path, recorded: Callable[[Path], Records]
) -> None:
    with SseServer(tokens(3, gap_s=0.05)) as server:
        process = started("synthetic:constant?n=2000&rate=40", tmp_path, server.url, 2)
        deadline = time.monotonic() + 60
        while len(server.asked) < 20 and time.monotonic() < deadline:
            time.sleep(0.05)
        members = children(process.pid)
        assert len(members) == 2
        # A terminal sends it to each process of the group.
        for pid in (*members, process.pid):
            os.kill(pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    (row,) = json.loads(out)
    assert row["interrupted"] is True and row["scheduled"] == 2000 and 20 <= row["sent"] < 2000
    records = recorded(tmp_path)
    assert len(records["begin"]) == len(records["end"]) == row["sent"] == row["completed"] + row["unfinished"]


def test_a_process_that_is_killed_makes_the_run_invalid_and_the_others_go_on(tmp_path: Path) -> None:
    with SseServer(tokens(2)) as server:
        process = started("synthetic:constant?n=60&rate=30", tmp_path, server.url, 2)
        deadline = time.monotonic() + 60
        while len(server.asked) < 10 and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(children(process.pid)[1], signal.SIGKILL)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    (row,) = json.loads(out)
    assert row["valid"] is False and "1 of 2 processes ended without their counts" in err
    assert (row["scheduled"], row["sent"], row["completed"]) == (60, 30, 30)


def test_members_end_when_the_first_process_is_killed(tmp_path: Path, recorded: Callable[[Path], Records]) -> None:
    with SseServer(tokens(3, gap_s=0.05)) as server:
        process = started("synthetic:constant?n=2000&rate=40", tmp_path, server.url, 2)
        deadline = time.monotonic() + 60
        while len(server.asked) < 10 and time.monotonic() < deadline:
            time.sleep(0.05)
        members = children(process.pid)
        process.kill()
        process.communicate(timeout=60)
        deadline = time.monotonic() + 60
        while any(Path(f"/proc/{pid}").exists() for pid in members) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(Path(f"/proc/{pid}").exists() for pid in members)
    records = recorded(tmp_path)
    assert len(records["begin"]) == len(records["end"]) >= 10


def test_an_events_directory_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("in the way")
    with SseServer(tokens(1)) as server:
        done = replayed(FORTY, tmp_path, "--url", server.url, "--processes", "2")
        assert server.asked == []
    assert done.returncode == 2 and "events directory" in done.stderr and "Traceback" not in done.stderr


def test_more_processes_than_requests_are_not_started(tmp_path: Path) -> None:
    with SseServer(tokens(1)) as server:
        done = replayed("synthetic:constant?n=1", tmp_path, "--url", server.url, "--processes", "8")
    (row,) = json.loads(done.stdout)
    assert (row["processes"], row["completed"]) == (1, 1)


def test_auto_takes_as_many_processes_as_the_busiest_second_asks_for() -> None:
    assert processes_for(constant(10, 100.0), 8) == 1
    assert processes_for(constant(1000, 900.0), 8) == 3  # 900 / 400, up
    assert processes_for(constant(1000, 900.0), 2) == 2
    # 20 answers of 40,000 tokens in 19 s: 42,105 events/s, over 15,000.
    long = build([TraceRow(n * S, 5, 40_000, n + 1) for n in range(20)], CONTRACT, Plan())
    assert processes_for(long, 8) == 3


def test_counts_add_up_and_quantiles_are_of_all_values() -> None:
    parts = []
    for lags in ([1, 5], [2, 9]):
        tally = Tally(
            sent=2, offered=2, retries=1, wall_ns=max(lags), cpu_share=lags[0] / 4, first_send_offset_ns=lags[0]
        )
        tally.outcomes["completed"] = 2
        tally.dispatch_lag_ns.extend(lags)
        parts.append(tally)
    total = Tally(processes=2)
    for tally in parts:
        total.add(tally)
    assert (total.sent, total.retries, total.outcomes["completed"]) == (4, 2, 4)
    assert (total.first_send_offset_ns, total.wall_ns, total.cpu_share) == (1, 9, 0.5)
    row = report(total, build(load("synthetic:constant?n=2").rows, CONTRACT, Plan()), CONTRACT)
    assert row["dispatch_lag_p50_s"] == 2e-9  # rank 2 of 1, 2, 5, 9


@pytest.mark.parametrize(
    ("lag_ms", "cpu_share", "processes", "said"),
    [
        (5, 0.99, 1, None),
        (6, 0.9, 1, "6.0ms late at p99 with 90% of a core used: --processes 2 shares the load"),
        (6, 0.9, 4, "in each of 4 processes, and there are 4 cores"),
        (6, 0.2, 1, "other work on this machine"),
        (6, None, 1, None),
    ],
)
def test_an_outgrown_core_is_told_from_a_busy_machine(
    lag_ms: int, cpu_share: float | None, processes: int, said: str | None
) -> None:
    tally = Tally(processes=processes, cpu_share=cpu_share)
    tally.dispatch_lag_ns.append(lag_ms * MS)
    found = outgrown(tally, cores=4)
    assert found is None if said is None else found is not None and said in found


def test_a_run_that_lost_a_process_is_not_valid() -> None:
    tally = Tally(processes=3, processes_lost=1)
    assert invalid_reason(tally, constant(2, 1.0)) == "1 of 3 processes ended without their counts"


def test_the_share_of_a_core_is_that_until_the_last_send(tmp_path: Path) -> None:
    def spin() -> None:
        until_s = os.times().user + 0.3
        while os.times().user < until_s:
            pass

    def later(loop: asyncio.AbstractEventLoop, running: Replay) -> None:
        loop.call_later(0.3, spin)

    # Sends for 1 s, in which the loop works for 0.3; then two seconds of waiting that no send needs.
    tally, _ = run(constant(2, 1.0), tokens(2, gap_s=2.0), tmp_path, meanwhile=later)
    assert tally.cpu_share is not None and 0.2 < tally.cpu_share < 1
    short, _ = run(constant(2, 100.0), tokens(1), tmp_path / "short")
    assert short.cpu_share is None
