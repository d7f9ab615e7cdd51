"""The CPU benchmark on the smallest model: every side answers, nothing is measured twice, weights stay the same."""

import itertools
import json
import runpy
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from benchmarks import engine_cpu
from benchmarks.engine_overhead import WARM_UP_TURNS, InstantRunner, measure_turns
from benchmarks.forward_sides import write_gguf
from reference_server.builtin import make_builtin
from reference_server.gguf_weights import read_gguf
from reference_server.runner import Runner
from reference_server.step_types import StepItem, StepResult
from tests.journals import journal_of
from tests.reference_server.test_model_weights import write_gguf as write_tiny_gguf

SMALL = ["--model", "builtin", "--context", "16", "--threads", "1"]


@pytest.fixture
def same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def measured(options: str, saved: Path) -> dict[str, Any]:
    engine_cpu.main([*SMALL, *options.split(), "--save", str(saved)])
    kept: dict[str, Any] = json.loads(saved.read_text())
    return kept


@pytest.mark.usefixtures("same_threads")
def test_all_sides_and_both_loops_have_a_row(tmp_path: Path) -> None:
    saved = tmp_path / "results" / "engine_cpu.json"
    kept = measured("--rounds 1 --steps 1 --turns 3 --format json", saved)
    sides = ["floor (plain products)", "floor (packed products)", "floor (plain products and a read of the KV)"]
    sides += ["sloscope", "transformers forward", "transformers generate"]
    whats = ["decode, batch 1", "decode, batch 16", "prefill, 16"]
    assert [(row["what"], row["side"]) for row in kept["forward"]] == [(what, side) for what in whats for side in sides]
    for row in kept["forward"]:
        assert row["min_ms"] == row["max_ms"] == row["ms"] > 0  # one round, and the one before does not count
        for side, column in zip(sides, ("x_plain", "x_packed", "x_plain_kv"), strict=False):
            assert row["side"] != side or row[column] == 1
    assert [(row["batch"], row["runner"]) for row in kept["loop"]] == [(64, "instant runner"), (16, "the model")]
    assert "--llama-python" in kept["about"]["llama_cpp"]


def test_a_turn_of_the_loop_is_a_decode_step_of_the_whole_batch_with_its_record(tmp_path: Path) -> None:
    config = make_builtin().config
    turns = list(measure_turns(InstantRunner(), config, 4, batch=5, context=33, turns=7, events=tmp_path))
    assert len(turns) == 7 and all(0 < turn.overhead_ns <= turn.wall_ns for turn in turns)
    steps = journal_of(tmp_path, "step")
    # One prefill of all prompts, 5 * 33 tokens, then the turns.
    assert [step["decode_tokens"] for step in steps] == [0] + [5] * (WARM_UP_TURNS + 7)
    assert steps[0]["prefill_tokens"] == 165


@pytest.mark.usefixtures("same_threads")
def test_the_loop_of_the_model_ends_in_time(tmp_path: Path) -> None:
    rows = measured("--part loop --turns 20 --loop-seconds 0.001", tmp_path / "loop.json")["loop"]
    assert [(row["batch"], row["turns"]) for row in rows] == [(64, 20), (16, 1)]


@pytest.mark.usefixtures("same_threads")
def test_an_interrupted_run_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, steps, step = tmp_path / "loop.json", itertools.count(), Runner.step

    def interrupted(runner: Runner, batch: Sequence[StepItem]) -> StepResult:
        if next(steps) == WARM_UP_TURNS + 5:
            signal.raise_signal(signal.SIGTERM)
        return step(runner, batch)

    monkeypatch.setattr(Runner, "step", interrupted)
    options = ["--part", "loop", "--turns", "200", "--loop-seconds", "600", "--save", str(saved)]
    monkeypatch.setattr(sys, "argv", ["engine_cpu", *SMALL, *options])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit, match=f"^{engine_cpu.INTERRUPTED}$"):
            runpy.run_path(engine_cpu.__file__, run_name="__main__")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "what was measured before is kept" in capsys.readouterr().err
    rows = json.loads(saved.read_text())["loop"]
    assert [(row["batch"], row["turns"]) for row in rows] == [(64, 200), (16, 5)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_llama_cpp_gets_the_same_weights(tmp_path: Path, dtype: str) -> None:
    write_tiny_gguf(tmp_path / "q8.gguf", quantize=gguf.GGMLQuantizationType.Q8_0)
    write_gguf(tmp_path / "q8.gguf", tmp_path / "wide.gguf", dtype)
    expected, read = read_gguf(tmp_path / "q8.gguf"), read_gguf(tmp_path / "wide.gguf")
    assert (read.config, read.tokenizer) == (expected.config, expected.tokenizer)
    matrices = [name for name, tensor in read.state.items() if tensor.ndim == 2]
    for name in matrices:
        assert torch.equal(read.state[name], expected.state[name].to(getattr(torch, dtype)).float()), name
    kinds = {tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "wide.gguf").tensors}
    assert kinds == ({"F32"} if dtype == "float32" else {"F32", "BF16"})
