"""Who gives way to whom, looked at in the processes themselves."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from exporter.priority import BEHIND, give_way, thread_gives_way

linux = pytest.mark.skipif(sys.platform != "linux", reason="policies and priorities of threads are Linux's")
SAYS = (
    "import os, sys, subprocess; sys.stdin.read(); print(os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0))"
)


@linux
def test_a_process_that_gives_way_and_what_it_starts_stand_behind_this_one() -> None:
    starts_another = f"import subprocess, sys; sys.stdin.read(); subprocess.run([sys.executable, '-c', {SAYS!r}])"
    child = subprocess.Popen([sys.executable, "-c", starts_another], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert give_way(child.pid) is None
    said, _ = child.communicate(timeout=20)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert said.split() == [b"%d" % min(19, own + BEHIND), b"%d" % os.SCHED_BATCH]


@linux
def test_a_thread_gives_way_alone() -> None:
    before, seen = os.getpriority(os.PRIO_PROCESS, 0), []

    def work() -> None:
        seen.append((thread_gives_way(), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(None, min(19, before + BEHIND))]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_a_priority_that_is_refused_is_told_in_a_word_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", refused)
    assert give_way(os.getpid()) == "Operation not permitted"
