"""Who gives way to whom: on a core that both want, the data plane goes before everything else of this sidecar."""

from __future__ import annotations

import os
import sys
import threading

BEHIND = 10  # nice levels: a tenth of a core that streams keep busy, so that a scrape still ends
_NICEST = 19


def give_way(pid: int) -> str | None:
    """Puts a process behind this one, with the threads and processes that it starts from now on. Why not, if refused.

    Needs no privilege, and cannot be taken back without one.
    """
    try:
        os.setpriority(os.PRIO_PROCESS, pid, min(_NICEST, os.getpriority(os.PRIO_PROCESS, 0) + BEHIND))
        if sys.platform == "linux":
            # Such a process waits for its turn when it wakes, whoever runs.
            os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0))
    except OSError as error:
        return error.strerror or str(error)
    return None


def thread_gives_way() -> str | None:
    """The same for the calling thread alone, where threads have priorities of their own."""
    return give_way(threading.get_native_id()) if sys.platform == "linux" else None
