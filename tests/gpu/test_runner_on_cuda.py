"""The runner on a CUDA device: captured graphs against ordinary steps, and no waiting inside a step."""

from collections.abc import Iterator

import pytest
import torch

from reference_server.builtin import make_builtin
from reference_server.loader import DTYPES
from reference_server.model import Llama
from reference_server.runner import Runner
from reference_server.step_types import SamplingParams, StepItem

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BLOCK_TOKENS = 16
PROMPTS = [list(range(10 * i + 2, 10 * i + 2 + length)) for i, length in enumerate((3, 30, 17, 1, 16))]
PARAMS = [
    SamplingParams(mask_eos=True),
    SamplingParams(1.0, 0.9, 7, mask_eos=True),
    SamplingParams(1.5, 1.0, 8),
    SamplingParams(),
    SamplingParams(2.0, 0.5, -1, mask_eos=True),
]


def make_runner(device: str, programs: bool | None = None, dtype: str = "float32") -> Runner:
    checkpoint = make_builtin(DTYPES[dtype])
    model = Llama(checkpoint.config, checkpoint.state, DTYPES[dtype], torch.device(device))
    return Runner(model, 128, BLOCK_TOKENS, 512, checkpoint.output_mask, programs)


def answers(runner: Runner, count: int = 40) -> list[list[int]]:
    """Prompts in chunks of 7, so that chunks and decodes share steps; then decodes only, in graphs if there are any."""
    n = len(PROMPTS)
    tables = [range(i, runner.kv.kv_blocks, n) for i in range(n)]
    sequences, held = [list(prompt) for prompt in PROMPTS], [0] * n
    while min(len(s) - len(p) for s, p in zip(sequences, PROMPTS, strict=True)) < count:
        ends = [min(len(s), at + 7) for s, at in zip(sequences, held, strict=True)]
        batch = [
            StepItem(tables[i], sequences[i][held[i] : ends[i]], held[i], ends[i] == len(sequences[i]), PARAMS[i])
            for i in range(n)
        ]
        for i, token in enumerate(runner.step(batch).token_ids):
            held[i] = ends[i]
            if token is not None:
                sequences[i].append(token)
    return [s[len(p) : len(p) + count] for s, p in zip(sequences, PROMPTS, strict=True)]


def decode_batch(runner: Runner, position: int = 30) -> list[StepItem]:
    n = len(PARAMS)
    return [StepItem(range(i, runner.kv.kv_blocks, n), [5 + i], position + i, True, PARAMS[i]) for i in range(n)]


@pytest.fixture
def _no_sync() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_graphs_choose_the_tokens_of_ordinary_steps() -> None:
    with_graphs = make_runner("cuda")
    assert answers(with_graphs) == answers(make_runner("cuda", programs=False))
    assert with_graphs._programs is not None and with_graphs._programs._programs


def test_what_was_prepared_is_not_captured_in_a_step() -> None:
    runner = make_runner("cuda")
    assert runner.prepare(len(PARAMS)) > 0
    for items in (decode_batch(runner), decode_batch(runner, 100)[:1], decode_batch(runner, 400)[2:4]):
        assert not runner.step(items).captured


def test_a_replayed_graph_answers_its_inputs_not_those_of_its_capture() -> None:
    runner, plain = make_runner("cuda"), make_runner("cuda", programs=False)
    generator = torch.Generator().manual_seed(1)
    for mine, other in zip(runner.kv._pools, plain.kv._pools, strict=True):
        content = torch.randn(mine.shape, generator=generator)
        mine.copy_(content)
        other.copy_(content)
    for position in (20, 17, 30, 25):  # one bucket of widths: two blocks
        batch = decode_batch(runner, position - 4)
        assert runner.step(batch).token_ids == plain.step(batch).token_ids


def test_the_device_agrees_with_the_cpu_in_float32() -> None:
    on_cpu, on_cuda = make_runner("cpu"), make_runner("cuda")
    tables, prompts = [range(8), range(8, 16)], PROMPTS[1:3]
    batch = [StepItem(t, p, 0, True) for t, p in zip(tables, prompts, strict=True)]
    # Another order of additions; logits are of size 10.
    torch.testing.assert_close(on_cuda.forward(batch).cpu(), on_cpu.forward(batch), atol=2e-3, rtol=0)


def test_bfloat16_stays_near_float32() -> None:
    wide, narrow = make_runner("cuda"), make_runner("cuda", dtype="bfloat16")
    batch = [StepItem(range(4), PROMPTS[1], 0, True)]
    expected, seen = wide.forward(batch), narrow.forward(batch)
    assert torch.nn.functional.cosine_similarity(expected, seen).item() > 0.99


@pytest.mark.usefixtures("_no_sync")
@pytest.mark.parametrize("programs", [True, False])
def test_a_step_does_not_wait_for_the_device_before_its_end(programs: bool) -> None:
    runner = make_runner("cuda", programs)
    mixed = [*decode_batch(runner), StepItem([127, 126], [3] * 20, 0, True, PARAMS[1])]
    begun = [StepItem([127, 126], [3] * 4, 20, False)]
    batches = [decode_batch(runner), mixed, begun]
    for batch in batches:
        runner.step(batch)  # capture and first uses may wait
    torch.cuda.set_sync_debug_mode("error")
    for batch in batches:
        result = runner.step(batch)
        assert result.device_ns is not None and result.device_ns > 0
