"""One scrape is one moment of the front end, though its text is made in another thread while requests come and go."""

import asyncio
import socket
import sys
from collections import Counter
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from reference_server.front_end import FrontEnd
from sloscope import records
from sloscope.clock import SystemClock

SCRAPES = 40


def requests_of(text: bytes) -> Counter[str]:
    counts: Counter[str] = Counter()
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            counts[sample.name.removeprefix("sloscope_engine_")] += sample.value
    return counts


async def scrapes_under_load() -> tuple[list[Counter[str]], int]:
    front = FrontEnd(SystemClock())
    ours, theirs = socket.socketpair()
    theirs.close()
    await front.connect(ours)
    await front.engine.lost.wait()  # nothing is asked of an engine that is gone: only this process is looked at
    over = False

    async def come_and_go() -> int:
        """Of those that begin in a turn of the loop all but one end in it, and that one in the next."""
        turns, before = 0, ""
        while not over:
            for number, outcome in enumerate(records.OUTCOMES):
                request_id = f"{turns}-{number}"
                await front.begin({"request_id": request_id})
                if number:
                    front.ended(request_id, outcome)
            if before:
                front.ended(before, "completed")
            before = f"{turns}-0"
            turns += 1
            await asyncio.sleep(0)
        return turns

    load = asyncio.create_task(come_and_go())
    seen = [requests_of(await front.scrape()) for _ in range(SCRAPES)]
    over = True
    turns = await load
    front.engine.close()
    return seen, turns


@pytest.fixture
def restless_threads() -> Iterator[None]:
    """Threads take turns so often that one reads while the other writes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless_threads")
def test_in_every_scrape_under_load_who_was_offered_has_ended_or_is_in_flight() -> None:
    seen, turns = asyncio.run(scrapes_under_load())
    offered = [counts["requests_offered_total"] for counts in seen]
    assert [counts["requests_ended_total"] + counts["inflight_requests"] for counts in seen] == offered
    assert {counts["inflight_requests"] for counts in seen[1:]} == {1}
    assert offered == sorted(offered) and offered[-1] > offered[0], "there was load between the scrapes"
    assert offered[-1] <= turns * len(records.OUTCOMES)
