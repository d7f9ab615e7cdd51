"""The GPU benchmark's bytes and table, on a CPU."""

import pytest
import torch

from benchmarks.gpu_roofline import decode_batch, main, model_config, roofline_row


def test_the_floor_is_weights_and_kv_at_the_copys_bandwidth() -> None:
    config = model_config(tiny=False, context=512)
    row = roofline_row(config, decode_batch(8, 512), 2, bytes_per_s=1e12, step_ms=5.0, device_ms=4.5)
    # Llama-3.2-1B: 16 layers of 2048 * 64 * (2 * 32 + 2 * 8) + 3 * 2048 * 8192 weights and a head of 128256 * 2048,
    # two bytes each; 8 sequences read 512 positions of 2 * 16 * 8 * 64 values, two bytes each.
    weights = 2 * (16 * (2048 * 64 * 80 + 3 * 2048 * 8192) + 128_256 * 2048)
    assert row["weight_mb"] == pytest.approx(weights / 1e6, rel=0.001)  # norms and embedding rows are small beside it
    assert row["kv_read_mb"] == pytest.approx(8 * 512 * 2 * 16 * 8 * 64 * 2 / 1e6, rel=0.003)
    floor_ms = (row["weight_mb"] + row["kv_read_mb"]) / 1e6 * 1e3  # at 1 TB/s
    assert row["floor_ms"] == pytest.approx(floor_ms, rel=0.001)
    assert row["step_over_floor"] == pytest.approx(5.0 / floor_ms, rel=0.001)
    assert row["tokens_per_s"] == 1600  # 8 in 5 ms


def test_the_tiny_run_prints_a_row_for_each_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tiny", "--batches", "1", "3", "--context", "40", "--runs", "2"]) == 0
    printed = capsys.readouterr().out
    assert "batch" in printed and "floor_ms" in printed and "CPU, copy" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="only where no device is")
def test_without_a_device_it_says_so_in_one_line_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 1
    said = capsys.readouterr().err.strip()
    assert said.startswith("gpu_roofline: no CUDA device is visible") and "\n" not in said
