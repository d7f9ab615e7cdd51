"""Coverage-guided fuzzing of what reads foreign bytes: `python -m tests.fuzz [--seconds N] [TARGET ...]`.

Needs atheris (libFuzzer for Python). Each target runs in a process of its own for so many seconds, from the streams
recorded from real servers where there are any. A finding is written to a file, which `--replay FILE TARGET` gives to
the target once more. The exit status is the number of targets with a finding.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

MAX_BYTES = 4096
FINDINGS = Path(tempfile.gettempdir()) / "sloscope-fuzz"


def fuzz_one(name: str, corpus: str, seconds: int, findings: str) -> None:
    """Does not return: libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["sloscope.sse", "exporter"]):
        from tests.fuzz.targets import TARGETS
    options = [
        sys.argv[0], f"-max_total_time={seconds}", f"-max_len={MAX_BYTES}", "-timeout=10", "-rss_limit_mb=2048",
        "-print_final_stats=1", f"-artifact_prefix={findings}/{name}-", corpus,
    ]  # fmt: skip
    atheris.Setup(options, lambda data: TARGETS[name](bytes(data)))
    atheris.Fuzz()


def run(name: str, seconds: int, findings: Path) -> bool:
    """Whether nothing was found."""
    from tests.fuzz.targets import seeds

    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(seeds(name)):
            (Path(corpus) / f"seed{number}").write_bytes(seed)
        began = len(list(Path(corpus).iterdir()))
        command = [
            sys.executable, "-m", "tests.fuzz", "--one", corpus, "--seconds", str(seconds), "--findings", str(findings),
            name,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds + 120)
        grown = len(list(Path(corpus).iterdir())) - began
    said = done.stderr
    units = re.search(r"stat::number_of_executed_units: (\d+)", said)
    coverage = re.findall(r"cov: (\d+)", said)
    sys.stdout.write(
        f"{name}: {units[1] if units else '?'} inputs in {seconds} s from {began} seeds, {grown} kept as new, "
        f"coverage {coverage[0] if coverage else '?'} → {coverage[-1] if coverage else '?'}, "
        f"{'nothing found' if done.returncode == 0 else 'FOUND'}\n"
    )
    if done.returncode:
        sys.stdout.write(said[-4000:] + done.stdout[-4000:])
    sys.stdout.flush()
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("targets", nargs="*", help="default: all")
    parser.add_argument("--seconds", type=int, default=30, help="per target")
    parser.add_argument("--findings", type=Path, default=FINDINGS, help="folder for what is found")
    parser.add_argument("--replay", type=Path, help="a finding")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        fuzz_one(given.targets[0], given.one, given.seconds, str(given.findings))
    from tests.fuzz.targets import TARGETS

    names = given.targets or list(TARGETS)
    if unknown := [name for name in names if name not in TARGETS]:
        parser.error(f"target: {unknown[0]!r} is not known; accepted: {', '.join(TARGETS)}")
    if given.replay:
        TARGETS[names[0]](given.replay.read_bytes())
        return 0
    given.findings.mkdir(parents=True, exist_ok=True)
    return sum(not run(name, given.seconds, given.findings) for name in names)


if __name__ == "__main__":
    sys.exit(main())
