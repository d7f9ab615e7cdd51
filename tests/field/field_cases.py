"""Which test holds which field case: cases.toml, checked against what pytest collects.

python -m tests.field.field_cases          every case with its tests; exit 1 when a test does not exist
python -m tests.field.field_cases --run    runs them, too; exit 1 when one fails or is skipped
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("cases.toml")
ABOUT = ("first token", "transport", "load", "clocks")


@dataclass(frozen=True)
class Case:
    name: str
    about: str
    says: str
    seen: tuple[str, ...]
    tests: tuple[str, ...]


def cases() -> list[Case]:
    with FILE.open("rb") as file:
        table = tomllib.load(file)
    return [
        Case(name, each["about"], each["says"], tuple(each["seen"]), tuple(each["tests"]))
        for name, each in table.items()
    ]


def named(found: list[Case]) -> list[str]:
    return list(dict.fromkeys(test for case in found for test in case.tests))


def collected(tests: list[str]) -> set[str]:
    """Every test of these tests' files as pytest names it, with and without its parameters."""
    files = sorted({test.partition("::")[0] for test in tests})
    existing = [file for file in files if (ROOT / file).is_file()]
    run = pytest_run("--collect-only", "-q", *existing)
    assert run.returncode == 0, run.stdout[-2000:]
    ids = {line for line in run.stdout.splitlines() if "::" in line}
    return ids | {each.partition("[")[0] for each in ids}


def pytest_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    # A run of its own, whatever test this is called from.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def main(arguments: list[str]) -> int:
    found = cases()
    tests = named(found)
    known = collected(tests)
    for case in found:
        sys.stdout.write(f"{case.name} ({case.about}): {case.says}\n")
        sys.stdout.writelines(f"    {'' if test in known else 'MISSING '}{test}\n" for test in case.tests)
    missing = [test for test in tests if test not in known]
    sys.stdout.write(f"{len(found)} cases, {len(tests)} tests, {len(missing)} missing\n")
    if missing or arguments != ["--run"]:
        return int(bool(missing))
    # Where nothing may be skipped, what a test needs and does not find is a failure.
    os.environ["SLOSCOPE_NO_SKIP"] = "1"
    run = pytest_run("-q", "-rs", *tests)
    sys.stdout.write(run.stdout[-3000:])
    return int(run.returncode != 0 or " skipped" in run.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
