"""Attention over paged KV against plain attention, for any block tables; decode programs against ordinary steps."""

import random
from dataclasses import replace

import pytest
import torch

from reference_server.attention import PagedKV, Span
from reference_server.builtin import make_builtin
from reference_server.decode_programs import shape_of, shapes
from reference_server.loader import make_runner
from reference_server.model_config import ModelConfig
from reference_server.runner import Runner
from reference_server.step_types import SamplingParams, StepItem

CONFIG = ModelConfig(
    layers=2,
    hidden=32,
    heads=6,
    kv_heads=2,
    head_dim=8,
    intermediate=16,
    vocab=11,
    rope_theta=500.0,
    norm_eps=1e-5,
    tie_embeddings=True,
    max_context=256,
    bos_id=None,
    eos_ids=(),
)
LAYER = 1


class Sequence:
    """Its keys and values, kept apart from the pool."""

    def __init__(self, blocks: list[int], length: int, generator: torch.Generator) -> None:
        self.blocks = blocks
        self.q = torch.randn(length, CONFIG.heads, CONFIG.head_dim, generator=generator)
        self.kv = torch.randn(length, 2 * CONFIG.kv_heads, CONFIG.head_dim, generator=generator)

    def attend(self, position: int) -> torch.Tensor:
        """One query at a time, one head at a time: [heads * head_dim]."""
        out = []
        for head in range(CONFIG.heads):
            shared = head // (CONFIG.heads // CONFIG.kv_heads)
            keys, values = self.kv[: position + 1, shared], self.kv[: position + 1, CONFIG.kv_heads + shared]
            weights = torch.softmax(keys @ self.q[position, head] / CONFIG.head_dim**0.5, dim=0)
            out.append(weights @ values)
        return torch.cat(out)


def run(kv: PagedKV, parts: list[tuple[Sequence, int, int]], blockwise: bool) -> torch.Tensor:
    """Positions from … to (exclusive) of each sequence in one step."""
    plan = kv.plan([Span(s.blocks, first, end - first) for s, first, end in parts], CONFIG.max_context, blockwise)
    q = torch.cat([s.q[first:end] for s, first, end in parts])
    return kv.attend(plan, LAYER, q, torch.cat([s.kv[first:end] for s, first, end in parts]))


def check(kv: PagedKV, parts: list[tuple[Sequence, int, int]], blockwise: bool) -> None:
    expected = torch.stack([s.attend(p) for s, first, end in parts for p in range(first, end)])
    torch.testing.assert_close(run(kv, parts, blockwise), expected, atol=1e-5, rtol=0)


def paged(kv_blocks: int, block_tokens: int, dtype: torch.dtype = torch.float32) -> PagedKV:
    kv = PagedKV(CONFIG, kv_blocks, block_tokens, dtype, torch.device("cpu"))
    for pool in kv._pools:
        pool.fill_(1e4)  # what an earlier holder left is large: any weight on it shows
    return kv


@pytest.mark.parametrize("blockwise", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_random_tables_and_mixed_steps_give_plain_attention(seed: int, blockwise: bool) -> None:
    drawn = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    block_tokens = drawn.choice([1, 3, 4, 16])
    lengths = [drawn.randint(2, 40) for _ in range(drawn.randint(1, 7))]
    needs = [-(-length // block_tokens) for length in lengths]
    # A pool that is just large enough, or one of which little is used.
    kv_blocks = sum(needs) * drawn.choice([1, 8])
    ids = drawn.sample(range(kv_blocks), sum(needs))
    kv = paged(kv_blocks, block_tokens)
    sequences = [
        Sequence([ids.pop() for _ in range(n)], length, generator) for n, length in zip(needs, lengths, strict=True)
    ]
    done = [0] * len(sequences)
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        parts = []
        for i in drawn.sample(range(len(sequences)), len(sequences)):
            tokens = min(drawn.choice([0, 1, 1, 5, 20]), lengths[i] - done[i])
            if tokens:
                parts.append((sequences[i], done[i], done[i] + tokens))
                done[i] += tokens
        parts.sort(key=lambda part: part[2] - part[1] > 1)
        if parts:
            check(kv, parts, blockwise)


@pytest.mark.parametrize("blockwise", [True, False])
def test_shared_prefixes_are_read_by_all_who_share_them(blockwise: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    kv = paged(kv_blocks=40, block_tokens=4)
    first = Sequence([5, 3, 7], 12, generator)
    run(kv, [(first, 0, 12)], blockwise)
    sharers = []
    for i, (shared, length) in enumerate([(2, 9), (2, 13), (2, 13), (2, 17), (1, 10)]):  # shared blocks
        sharer = Sequence(first.blocks[:shared] + [10 + 3 * i + j for j in range(3)], length, generator)
        sharer.kv[: 4 * shared] = first.kv[: 4 * shared]
        if length - 1 > 4 * shared:
            run(kv, [(sharer, 4 * shared, length - 1)], blockwise)
        sharers.append(sharer)
    check(kv, [(s, len(s.q) - 1, len(s.q)) for s in sharers], blockwise)


@pytest.mark.parametrize("blockwise", [True, False])
def test_bfloat16_stays_near_plain_attention_in_float32(blockwise: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    kv = paged(40, 4, torch.bfloat16)
    sequences = [Sequence([3 * i + j for j in (2, 0, 1)], 12, generator) for i in range(5)]
    steps = [[(s, 0, 9 + i % 2) for i, s in enumerate(sequences)], [(s, 11, 12) for s in sequences]]
    steps.insert(1, [(s, 9 + i % 2, 11) for i, s in enumerate(sequences)])
    for parts in steps:
        parts.sort(key=lambda part: part[2] - part[1] > 1)
        plan = kv.plan([Span(s.blocks, a, b - a) for s, a, b in parts], CONFIG.max_context, blockwise)
        q = torch.cat([s.q[a:b] for s, a, b in parts]).bfloat16()
        seen = kv.attend(plan, LAYER, q, torch.cat([s.kv[a:b] for s, a, b in parts]).bfloat16())
        assert seen.dtype == torch.bfloat16
        expected = torch.stack([s.attend(p) for s, a, b in parts for p in range(a, b)])
        # 8 bits: scores of size 3 are off by 0.01, weights by 1 %, values of size 3 and the sum of them by 0.01 each.
        torch.testing.assert_close(seen.float(), expected, atol=0.06, rtol=0)


def test_blocks_lying_close_are_read_in_place_and_the_rest_is_gathered() -> None:
    kv = paged(kv_blocks=100, block_tokens=4)
    # Used: 2, 3, 5 (twice) and 90. Of 2 … 5 three of four are used; up to 90 it would be 4 of 89.
    spans = [Span([5, 3], 4, 1), Span([5, 90, 2], 9, 1)]
    plan = kv.plan(spans, CONFIG.max_context, blockwise=True).blockwise
    assert plan is not None and (plan.low, plan.high) == (2, 6)
    assert plan.gathered is not None and plan.gathered.tolist() == [5, 90]
    # Pairs: blocks 2, 3, 4 (nobody's), 5 of the first; then 5 and 90 of the second.
    assert plan.owner.tolist() == [1, 0, 0, 0, 1, 1]
    assert plan.pairs_of.view(2, -1).tolist() == [[3, 1, 3], [4, 5, 0]]
    seen = (plan.mask == 0).view(6, 2, 4).sum(-1).tolist()
    assert seen == [[2, 2], [1, 1], [0, 0], [4, 4], [4, 4], [4, 4]]


def test_little_kv_is_gathered_and_much_is_attended_where_it_lies() -> None:
    kv = paged(kv_blocks=600, block_tokens=16)
    # A block takes 2 * 2 heads * 16 positions * 8 numbers * 4 bytes = 2 KiB in a layer: 512 of them are 1 MiB.
    spans = [Span(range(16 * i, 16 * i + 16), 255, 1) for i in range(33)]
    plan = kv.plan(spans[:32], CONFIG.max_context)
    assert plan.blockwise is None and [padded.sequences for padded in plan.padded] == [32]
    plan = kv.plan(spans, CONFIG.max_context)
    assert plan.blockwise is not None and not plan.padded


def test_prompts_of_like_lengths_are_padded_together_and_others_apart() -> None:
    kv = paged(kv_blocks=1000, block_tokens=1)
    lengths = [100, 200, 104, 96]  # 3 * 104 * 104 = 32448 pairs for 30032; with 200 it would be 160000 for 70032
    spans = [Span(range(250 * i, 250 * i + n), 0, n) for i, n in enumerate(lengths)]
    plan = kv.plan(spans, CONFIG.max_context)
    assert [padded.sequences for padded in plan.padded] == [3, 1]
    assert all(padded.mask is None and padded.blocks is None for padded in plan.padded)
    # The same lengths after 4 earlier tokens: those need a mask, and are not mixed with prompts that begin.
    begun = [Span(range(104), 4, 100)]
    plan = kv.plan([*begun, spans[2]], CONFIG.max_context)
    assert [(padded.sequences, padded.mask is None) for padded in plan.padded] == [(1, False), (1, True)]


def steps(runner: Runner, prompts: list[list[int]], params: list[SamplingParams], count: int) -> list[list[int]]:
    """Prompts first, then decodes side by side; block j of sequence i is j * sequences + i."""
    n = len(prompts)
    tables = [range(i, runner.kv.kv_blocks, n) for i in range(n)]
    answers: list[list[int]] = [[] for _ in prompts]
    new, held = list(prompts), [0] * n
    for _ in range(count):
        batch = [StepItem(tables[i], new[i], held[i], True, params[i]) for i in range(n)]
        for i, token in enumerate(runner.step(batch).token_ids):
            assert token is not None
            held[i] += len(new[i])
            new[i] = [token]
            answers[i].append(token)
    return answers


def builtin_runner(programs: bool = False, kv_blocks: int = 64) -> Runner:
    runner = make_runner(make_builtin(), kv_blocks, max_context=256)
    return Runner(runner.model, kv_blocks, 16, 256, runner._output_mask, programs)


PARAMS = [
    SamplingParams(mask_eos=True),
    SamplingParams(1.0, 0.9, 7, mask_eos=True),
    SamplingParams(1.5, 1.0, 8),
    SamplingParams(),
    SamplingParams(2.0, 0.5, -1, mask_eos=True),
]
PROMPTS = [list(range(10 * i + 2, 10 * i + 2 + length)) for i, length in enumerate((3, 30, 17, 1, 16))]


@pytest.mark.parametrize("kinds", [(0, 3), (0, 2, 3), (0, 1, 2, 3, 4)], ids=["greedy", "drawn", "nucleus"])
def test_decode_programs_choose_the_tokens_of_ordinary_steps(kinds: tuple[int, ...]) -> None:
    prompts, params = [PROMPTS[i] for i in kinds], [PARAMS[i] for i in kinds]
    with_programs = builtin_runner(programs=True)
    assert steps(with_programs, prompts, params, 30) == steps(builtin_runner(), prompts, params, 30)
    assert with_programs._programs is not None
    shapes = list(with_programs._programs._programs)
    # Rows 2, 3, 5 in powers of two; widths 1, 2, 4 as the longest grows (30 + 29 tokens are 4 blocks of 16).
    assert {shape.rows for shape in shapes} == {{2: 2, 3: 4, 5: 8}[len(kinds)]}
    assert {(shape.draws, shape.nucleus) for shape in shapes} == {(len(kinds) > 2, len(kinds) > 3)}


def test_a_program_serves_all_batches_up_to_its_size() -> None:
    batch = [StepItem(range(9), [1], position, True) for position in (15, 16, 40, 5, 6)]
    assert shape_of(batch, 16, widest=9) == (8, 4, False, False)  # position 40 lies in the third block
    assert shape_of(batch[:3], 16, widest=9) == (4, 4, False, False)
    assert shape_of(batch[:1], 16, widest=9) == (1, 1, False, False)
    assert shape_of(batch, 16, widest=3) == (8, 3, False, False)  # the longest context has three


def test_a_context_that_is_no_power_of_two_of_blocks_runs_to_its_end() -> None:
    prompts = [list(range(2, 70)), [5, 6]]  # 68 + 11 tokens: the fifth block of five
    model = builtin_runner().model
    model.config = replace(model.config, max_context=80)
    with_programs, plain = (Runner(model, 64, programs=programs) for programs in (True, False))
    assert steps(with_programs, prompts, PARAMS[:2], 12) == steps(plain, prompts, PARAMS[:2], 12)


def test_no_step_captures_a_program_after_the_preparation() -> None:
    runner = builtin_runner(programs=True, kv_blocks=80)
    decode = [StepItem(range(16 * i, 16 * i + 16), [1], 0, True, params) for i, params in enumerate(PARAMS)]
    assert runner.step(decode[:1]).captured and not runner.step(decode[:1]).captured
    # Rows 8, 4, 2, 1 and widths 16, 8, 4, 2, 1 in three kinds each.
    assert runner.prepare(5) == 4 * 5 * 3
    for position in (0, 17, 40, 100, 255):
        for first in range(5):
            for last in range(first + 1, 6):
                batch = [item._replace(position0=position) for item in decode[first:last]]
                assert not runner.step(batch).captured, (position, first, last)
    assert builtin_runner().prepare(5) == 0


def test_programs_that_would_be_larger_than_the_pool_are_left_to_their_first_use() -> None:
    sizes = [(shape.rows, shape.width) for shape in shapes(most_rows=3, widest=5, kv_blocks=7)][::3]
    # Up to 8 places: 4 rows of 5 or of 4 blocks, and 2 of 5, have more.
    assert sizes == [(4, 2), (4, 1), (2, 4), (2, 2), (2, 1), (1, 5), (1, 4), (1, 2), (1, 1)]


def test_an_answer_does_not_depend_on_who_else_is_in_the_batch() -> None:
    together = steps(builtin_runner(), PROMPTS, PARAMS, 40)
    alone = [steps(builtin_runner(), [PROMPTS[i]], [PARAMS[i]], 40)[0] for i in range(5)]
    assert together == alone


def test_a_sequence_that_lost_its_blocks_and_is_computed_again_goes_on_as_before() -> None:
    whole = steps(builtin_runner(), PROMPTS, PARAMS, 40)
    first = steps(builtin_runner(), PROMPTS, PARAMS, 13)
    again = steps(builtin_runner(), [p + a for p, a in zip(PROMPTS, first, strict=True)], PARAMS, 27)
    assert [a + b for a, b in zip(first, again, strict=True)] == whole
