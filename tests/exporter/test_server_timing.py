"""What hops that are not ours say about themselves, in the record."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.server_timing import durations_ns
from tests.exporter.harness import DONE, STREAM_HEAD, Seen, bench, chunked, event, finish, run

MS = 1_000_000


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("cache;dur=23.2", {"cache": 23_200_000}),
        ('db;dur=53, app;desc="a, b; dur=9";dur=47', {"db": 53 * MS, "app": 47 * MS}),
        ("miss, db ; dur = 0 ,,app;DUR=1", {"db": 0, "app": MS}),
        ('gw;dur="12.5"', {"gw": 12_500_000}),
        ("a;dur=1, a;dur=2", {"a": MS}),
        ("a;dur=1;dur=2", {"a": MS}),
        ("a;dur=0.0000019", {"a": 1}),
        ("a;dur=-1, b;dur=1e3, c;dur=, d;dur=NaN, e;dur=1.2.3, f;dur=9999999999999, g;dur=5", {"g": 5 * MS}),
        ('a;desc="open;dur=1, b;dur=2', {}),
        ("a b;dur=1, c;dur=2", {"c": 2 * MS}),
        ("=;dur=1", {}),
        ("", {}),
        ("a," * 63 + "b;dur=1", {"b": MS}),
        ("a," * 64 + "b;dur=1", {}),
        (", ".join(f"n{number};dur=1" for number in range(40)), {f"n{number}": MS for number in range(16)}),
        ("x" * 65 + ";dur=1", {}),
    ],
)
def test_durations_by_name(header: str, found: dict[str, int]) -> None:
    assert durations_ns(header) == found


def test_a_header_is_read_for_its_first_four_kilobytes_and_no_number_is_cut() -> None:
    begun, late = "gw;dur=1", "late;dur=12"
    padding = "x" * (4096 - len(f'{begun},x;desc="",{late}'))
    cut = f'{begun},x;desc="{padding}",{late}'
    assert len(cut) == 4096
    assert durations_ns(cut) == {"gw": MS, "late": 12 * MS}
    assert durations_ns(cut + "34") == {"gw": MS}
    assert durations_ns("a;dur=1" + "0" * 5000) == {}


@pytest.mark.parametrize("entry", ["a;dur=1,", "a,", ","])
def test_a_header_of_sixty_four_kilobytes_costs_the_loop_less_than_a_millisecond(entry: str) -> None:
    """It never comes to as many durations as are read at most."""
    header = entry * (65536 // len(entry))
    took = []
    for _ in range(20):
        began = time.process_time()
        durations_ns(header)
        took.append(time.process_time() - began)
    assert min(took) < 0.001


@given(st.text(alphabet='abdur=;, "\\\t1.é', max_size=200))
def test_no_header_raises_and_every_duration_is_in_range(header: str) -> None:
    assert all(0 <= ns <= 10**15 and 0 < len(name) <= 64 for name, ns in durations_ns(header).items())


def test_the_end_record_has_them_and_a_response_without_has_none(tmp_path: Path) -> None:
    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        said = b'server-timing: cache;desc="user@example";dur=2.5\r\nServer-Timing: gateway;dur=40\r\n'
        head = STREAM_HEAD.replace(b"\r\n", b"\r\n" + said, 1) if seen.header("x-timed") else STREAM_HEAD
        writer.write(head + chunked(event(), finish(), DONE))

    async def test() -> None:
        async with bench(tmp_path, script) as b:
            answer = await b.ask(b'{"stream":true}', "x-timed: 1")
            assert answer.head.lower().count(b"server-timing") == 2, "it is passed on as it came"
            await b.ask()
            first, second = await b.ends(2)
            assert first["server_timing"] == {"cache": 2_500_000, "gateway": 40 * MS}
            assert "server_timing" not in second

    run(test())
