"""The source that replays are measured against: its own work must not look like its clients' lateness."""

from __future__ import annotations

import asyncio
import json
import re
import time
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import cast

import uvloop

from benchmarks.streaming import proxies
from benchmarks.streaming.source import Pace, Stream


def test_a_burst_goes_out_in_slices_with_a_turn_of_the_loop_between_them() -> None:
    sent = 0

    class Busy:
        def emit(self, due_ns: int) -> int | None:
            nonlocal sent
            sent += 1
            until_ns = time.monotonic_ns() + 100_000
            while time.monotonic_ns() < until_ns:
                pass
            return None

    async def watch() -> list[int]:
        pace, due_ns = Pace(asyncio.get_running_loop()), time.monotonic_ns()
        for _ in range(100):
            pace.add(due_ns, cast(Stream, Busy()))
        seen = [0]
        while sent < 100:
            await asyncio.sleep(0)
            seen.append(sent)
        return seen

    seen = uvloop.run(watch())
    # A slice of 0.2 ms begins no event after its end, so it has at most two of 0.1 ms.
    assert max(after - before for before, after in pairwise(seen)) <= 2


def test_the_stamps_of_a_finished_answer_are_in_the_log_once_the_source_has_ended(tmp_path: Path) -> None:
    log = tmp_path / "stamps.jsonl"
    with proxies.source(3, 100, "--ttft-ms", "20", "--pause-ms", "30", "--log", str(log)) as url:
        body = json.dumps({"model": "bench", "messages": [{"role": "user", "content": "a"}]}).encode()
        asking = urllib.request.Request(f"{url}/v1/chat/completions", body, {"x-request-id": "mine"})
        with urllib.request.urlopen(asking, timeout=30) as answer:
            text = answer.read().decode()
        assert log.read_text() == ""
    (line,) = log.read_text().splitlines()
    told = json.loads(line)
    assert told["id"] == "mine"
    assert told["sent_ns"] == [int(stamp) for stamp in re.findall(r"\d{20}", text)]
    # First event 20 ms after the request, the next 10 ms later, the last 10 and 30 ms after that; never early.
    for sent_ns, due_ms in zip(told["sent_ns"], [20, 30, 70], strict=True):
        assert sent_ns >= told["arrived_ns"] + due_ms * 1_000_000
