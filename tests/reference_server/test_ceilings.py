from dataclasses import asdict
from math import isfinite

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference_server.builtin import make_builtin
from reference_server.ceilings import _attention, _flops, _weights, measure, rate
from reference_server.roofline import Ceilings
from reference_server.work import Work
from sloscope.records import SCHEMA
from tests.roofline import achieved

CONFIG = make_builtin().config
CPU = torch.device("cpu")
# In one nanosecond: 10 operations, 4 bytes of weights, 2 bytes of KV, 1 byte of transfer.
CEILINGS = Ceilings(10e9, 4e9, 2e9, 1e9)


def work(flops: int = 0, weight: int = 0, kv_read: int = 0, kv_write: int = 0, transfer: int = 0) -> Work:
    return Work(flops, 0, 0, 0, weight, kv_read, kv_write, transfer)


def test_arithmetic_hides_behind_memory_and_transfers_hide_behind_nothing() -> None:
    # 500 operations: 50 ns. 400 bytes of weights: 100 ns. 30 + 10 bytes of KV: 20 ns. 5 bytes over the link: 5 ns.
    got = achieved(work(500, 400, 30, 10, 5), duration_ns=250, ceilings=CEILINGS)
    assert got == (50, 100, 20, 5, 120 + 5, 0.5, "weight")


def test_prefill_hides_memory_behind_arithmetic() -> None:
    # 2,000 operations: 200 ns, longer than 100 + 20 ns of memory.
    got = achieved(work(2_000, 400, 30, 10, 5), duration_ns=410, ceilings=CEILINGS)
    assert (got.least_ns, got.share, got.binds) == (205, 0.5, "flops")


@pytest.mark.parametrize(
    ("what", "binds"),
    [
        (work(kv_read=300, weight=400), "kv"),  # 150 ns against 100 ns
        (work(flops=2_400, kv_read=300, weight=400), "kv"),  # 240 ns of arithmetic, 250 ns of memory
        (work(flops=2_500, kv_read=300, weight=400), "flops"),
        (work(kv_write=100, transfer=51), "transfer"),  # 51 ns after 50 ns
        (work(), ""),
    ],
)
def test_what_binds_is_the_largest_part(what: Work, binds: str) -> None:
    assert achieved(what, 1_000, CEILINGS).binds == binds


AMOUNT = st.integers(0, 10**9)


@given(st.builds(work, AMOUNT, AMOUNT, AMOUNT, AMOUNT, AMOUNT), st.builds(work, AMOUNT, AMOUNT, AMOUNT, AMOUNT, AMOUNT))
def test_two_steps_in_one_never_have_a_larger_least_time(a: Work, b: Work) -> None:
    both = Work(*(x + y for x, y in zip(a, b, strict=True)))
    apart = achieved(a, 1, CEILINGS).least_ns + achieved(b, 1, CEILINGS).least_ns
    assert achieved(both, 1, CEILINGS).least_ns <= apart * (1 + 1e-9)


def test_the_engine_record_has_every_ceiling() -> None:
    assert set(CEILINGS.record_fields()) <= {field.name for field in SCHEMA["engine"]}


def test_a_rate_is_taken_at_the_median_after_a_warm_up() -> None:
    times = iter([0, 2, 10, 11, 20, 29])  # durations 2, 1, 9
    runs: list[str] = []
    got = rate(
        lambda: runs.append("run"), 100, seconds=0, wait=lambda: runs.append("wait"), now=lambda: float(next(times))
    )
    assert got == 50
    assert runs == ["run", "wait"] * 4


def test_a_real_calibration_fills_every_ceiling() -> None:
    found = measure(CONFIG, torch.float32, CPU, seconds=0.1, working_set_bytes=4 << 20, width=256)
    assert all(isfinite(rate) and rate > 0 for rate in asdict(found).values())


def test_what_is_run_is_what_is_counted() -> None:
    """Built-in model: 2 KV heads of 32. 1,024 positions of keys are 2 · 1,024 · 32 · 4 = 262,144 bytes."""
    _, operations = _flops(torch.float32, CPU, tokens=16, width=64)
    assert operations == 2 * 16 * 64 * 64
    # A matrix of 64 · 64 · 4 = 16,384 bytes goes 3 times into 50,000 bytes.
    assert [amount for _, amount in _weights(torch.float32, CPU, 50_000, width=64)] == [49_152] * 2
    # Keys and values of one sequence are 524,288 bytes, which go twice into 1.2 million.
    ways = _attention(CONFIG, torch.float32, CPU, 1_200_000)
    assert [amount for _, amount in ways] == [1_048_576] * 2
    assert [tuple(run().shape) for run, _ in ways] == [(2, 2, 2, 32), (2, 2, 1, 32)]  # type: ignore[attr-defined]
