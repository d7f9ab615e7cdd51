"""A second process for a large pass, where a second core is idle.

The child is forked, so that it begins with everything that the pass has read, and it holds the pass's lock for as long
as it lives. What it does not hand back, because it was killed or its disk was full, the pass does itself: every error
is met and told in one place.
"""

import contextlib
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection

_OURS_TO_HANDLE = (signal.SIGINT, signal.SIGTERM)


def second_core() -> bool:
    """Whether a child may be forked and has a core to run on. Another thread may hold a lock that nobody would release
    in the child.
    """
    return hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1 and threading.active_count() == 1


@contextmanager
def child(work: Callable[[Connection], None]) -> Iterator[Connection]:
    """Runs `work` in a forked child; gives the other end of its pipe, which raises EOFError or OSError when the
    child has ended.

    The child is gone when the block is left. A signal that asks the pass to stop meets the pass alone, which kills it.
    """
    ours, theirs = Pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OURS_TO_HANDLE)
    try:
        with warnings.catch_warnings():
            # Of threads that Python does not know: those of Arrow, which restarts its own after a fork, and of BLAS.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                work(theirs)
            finally:
                os._exit(0)
    except BaseException:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        raise
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        yield ours
    finally:
        ours.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
