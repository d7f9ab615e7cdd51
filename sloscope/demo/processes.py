"""Child processes of the demo: started, waited for, and always ended."""

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from sloscope.errors import ConfigError

SLOSCOPE = (sys.executable, "-m", "sloscope")


class Child:
    """A process whose standard error goes to a log file and is searched for a line that says it is ready."""

    def __init__(self, name: str, command: Sequence[str], log_dir: Path) -> None:
        self.name = name
        self.log = log_dir / f"{name}.log"
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with open(self.log, "w") as log:
            for line in self.process.stderr:
                log.write(line)
                log.flush()
                with self._changed:
                    self._lines.append(line)
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, pattern: str, timeout_s: float) -> re.Match[str]:
        """The first line that matches. ConfigError with the child's own last line if it ends or stays silent."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                for line in self._lines:
                    if match := re.search(pattern, line):
                        return match
                left = deadline - time.monotonic()
                if left <= 0 or not self._reader.is_alive():
                    said = self._lines[-1].strip() if self._lines else "nothing"
                    raise ConfigError(f"{self.name}: did not start; it said: {said} (log: {self.log})")
                self._changed.wait(min(left, 0.2))

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def stop(self, timeout_s: float = 15) -> int:
        """Asks it to end, then makes it end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(5)
        if self.process.stdin is not None:
            self.process.stdin.close()
        if self.process.stderr is not None:
            self.process.stderr.close()
        return self.process.returncode


class Stage:
    """The children of one demo; leaving the block ends them in reverse order."""

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self.children: list[Child] = []

    def start(self, name: str, *command: str) -> Child:
        child = Child(name, command, self.log_dir)
        self.children.append(child)
        return child

    def sloscope(self, name: str, *arguments: str) -> Child:
        return self.start(name, *SLOSCOPE, *arguments)

    def stop(self, child: Child) -> None:
        child.stop()
        self.children.remove(child)

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, *_: object) -> None:
        for child in reversed(self.children):
            child.stop()


def ask(*arguments: str, timeout_s: float = 120) -> str:
    """Standard output of one finished `sloscope` command. ConfigError carries what it said when it failed."""
    done = subprocess.run([*SLOSCOPE, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise ConfigError(f"sloscope {arguments[0]}: exit {done.returncode}: {said}")
    return done.stdout
