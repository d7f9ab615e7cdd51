"""The CPU benchmark on the smallest model: every side answers, nothing is measured twice, weights stay the same."""

import json
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch

from benchmarks import engine_cpu
from benchmarks.engine_overhead import WARM_UP_TURNS, InstantRunner, measure_turns
from benchmarks.forward_sides import write_gguf
from reference_server.builtin import make_builtin
from reference_server.gguf_weights import read_gguf
from tests.journals import journal_of
from tests.reference_server.test_model_weights import write_gguf as write_tiny_gguf


def test_all_sides_and_both_loops_have_a_row(tmp_path: Path) -> None:
    saved = tmp_path / "results" / "engine_cpu.json"
    options = "--model builtin --context 16 --threads 1 --rounds 1 --steps 1 --turns 3 --format json"
    threads = torch.get_num_threads()
    try:
        engine_cpu.main([*options.split(), "--save", str(saved)])
    finally:
        torch.set_num_threads(threads)
    kept = json.loads(saved.read_text())
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


def test_the_loop_of_the_model_ends_in_time_and_an_interrupted_run_keeps_its_rows(tmp_path: Path) -> None:
    saved = tmp_path / "loop.json"
    command = [sys.executable, "-m", "benchmarks.engine_cpu", "--part", "loop", "--model", "builtin"]
    command += ["--context", "16", "--threads", "1", "--turns", "400", "--save", str(saved)]
    subprocess.run([*command, "--loop-seconds", "0.001"], check=True, capture_output=True)
    rows = json.loads(saved.read_text())["loop"]
    assert [(row["batch"], row["turns"]) for row in rows] == [(64, 400), (16, 1)]
    saved.unlink()
    with subprocess.Popen([*command, "--loop-seconds", "600"], stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        next(line for line in child.stderr if "the model" in line)  # which takes seconds for 400 turns
        child.terminate()
        said = child.stderr.read()
    assert child.returncode == engine_cpu.INTERRUPTED and "what was measured before is kept" in said
    rows = json.loads(saved.read_text())["loop"]
    assert (rows[0]["batch"], rows[0]["turns"]) == (64, 400)


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
