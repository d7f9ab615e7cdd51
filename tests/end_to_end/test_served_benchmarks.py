"""The benchmarks that run the real server off and on, as small as they go: on differs from off as they say."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import kv_reservation, remaining_length, slow_reader

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
# Faster than any machine here serves it, so that requests wait.
LOAD = ["--rate", "500", "--lengths", "prompt_p50=16&prompt_sigma=0.3&output_p50=8&output_sigma=0.3"]


def kept(main: Callable[[list[str]], int], path: Path, *options: str) -> dict[str, Any]:
    assert main([*options, "--format", "json", "--save", str(path)]) == 0
    rows: dict[str, Any] = json.loads(path.read_text())
    return rows


def test_optimism_lets_more_requests_run_and_reuse_runs_a_prefix_once(tmp_path: Path) -> None:
    small = (
        "--rate",
        "5000",
        "--requests",
        "30",
        "--rounds",
        "1",
        "--prefix-requests",
        "3",
        "--prefix",
        "64",
        "--own",
        "8",
    )
    rows = kept(kv_reservation.main, tmp_path / "kv.json", *LOAD, *small)
    full, optimistic, estimate = rows["reservation"]
    assert [row["reservation"] for row in rows["reservation"]] == ["full", "optimistic", "estimate"]
    assert [row["completed"] for row in rows["reservation"]] == [30, 30, 30]
    # A prompt and 160 tokens that may come need 21 of 160 blocks and more.
    assert full["at_once_mean"] <= 7 < optimistic["at_once_mean"]
    assert full["preemptions"] == full["run_twice"] == 0
    assert full["reserved_share"] > estimate["reserved_share"] > optimistic["reserved_share"]
    off, on = rows["prefix"]
    assert (off["prefix_reuse"], off["reused"], off["run"]) == ("off", 0, off["prompt_tokens"])
    # Two whole blocks of 32 tokens and more, for the second and the third.
    assert (on["prefix_reuse"], on["prompt_tokens"]) == ("on", off["prompt_tokens"]) and on["reused"] >= 2 * 64


def test_with_lengths_fewer_are_refused_and_first_tokens_come_nearer_to_what_was_said(tmp_path: Path) -> None:
    rows = kept(remaining_length.main, tmp_path / "lengths.json", *LOAD, "--requests", "90", "--kv-blocks", "48")[
        "real"
    ]
    assert [(row["admission"], row["lengths"]) for row in rows] == [
        ("earlier load, all let in", "-"),
        ("deadline", "off"),
        ("deadline", "on"),
    ]
    earlier, off, on = rows
    assert [row["good"] + row["late"] + row["refused"] for row in rows] == [45, 45, 45]
    assert earlier["refused"] == 0 and earlier["good"] in (22, 23)  # the limit is the median of 90 first tokens
    assert off["refused"] > on["refused"]
    # An answer of 8 tokens that counts as 320 makes everybody's wait look longer.
    assert off["error_p50_s"] < on["error_p50_s"]


def test_who_never_reads_is_computed_to_the_window_or_to_the_end(tmp_path: Path) -> None:
    small = ("--readers", "2", "--tokens", "20", "--silent-tokens", "1500", "--window", "64", "--rounds", "1")
    off, on = kept(slow_reader.main, tmp_path / "reader.json", *small, "--slow-reader-after", "1s")["real"]
    for row in (off, on):
        assert row["ended"] == "cancelled(slow_reader)"
        assert row["gap_alone_ms"] > 0 and row["gap_beside_ms"] > 0
    assert (off["max_undelivered"], off["computed"]) == ("0 (off)", 1500)
    assert (on["max_undelivered"], on["undelivered"]) == ("64", 64)
    assert 64 <= on["computed"] < 1500 and on["kv_blocks"] < off["kv_blocks"]
