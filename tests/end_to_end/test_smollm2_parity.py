"""SmolLM2 from its GGUF file against `transformers` on the same file: logits' argmax, tokens and text.

The oracle decodes greedily in float32. A prompt is compared token by token until the oracle's two best logits are
closer than MARGIN: there the order of additions decides, and either token is right.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from reference_server.kv_blocks import BlockPool
from reference_server.loader import load_checkpoint, make_runner
from reference_server.model_store import ModelSource, fetch_smollm2
from reference_server.policies import Optimistic
from reference_server.prefill_budget import Static
from reference_server.request import Request
from reference_server.runner import Runner
from reference_server.scheduler import Limits, Policies, Scheduler
from reference_server.step_types import StepItem
from reference_server.tokenizer import Tokenizer

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    # transformers and its GGUF reader warn about their own affairs.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

NEW_TOKENS = 64
MARGIN = 1e-3

CHATS = [
    "What is the capital of France?",
    "Name three animals that live in the sea.",
    "Write a haiku about the winter.",
    "Explain gravity to a child in two sentences.",
    "What is 17 plus 25? Show the steps.",
    "Translate 'good morning' into Spanish.",
    "Give me a Python function that reverses a string.",
    "Why is the sky blue?",
    "Was ist die Hauptstadt von Österreich? 🏔",
    "List the planets, one per line,\n  starting from the sun.",
]
COMPLETIONS = [
    "Once upon a time, in a small village by the sea,",
    "The three laws of thermodynamics are",
    "def fibonacci(n):\n    ",
    "In 1969, the first man",
    "To make a good loaf of bread you need",
    "SELECT name, count(*) FROM",
    "Water boils at 100 degrees Celsius because",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear Ms. Novák,\n\nThank you for",
    "The difference between TCP and UDP is",
]


@dataclass(frozen=True)
class Answer:
    """The oracle's greedy tokens and, for each, by how much it beat the second best."""

    prompt: list[int]
    tokens: list[int]
    margins: list[float]


@pytest.fixture(scope="module")
def model_path() -> Path:
    return fetch_smollm2()


@pytest.fixture(scope="module")
def tokenizer_and_runner(model_path: Path) -> tuple[Tokenizer, Runner]:
    checkpoint = load_checkpoint(ModelSource("smollm2", model_path))
    return Tokenizer(checkpoint.tokenizer), make_runner(checkpoint, kv_blocks=20 * 16, block_tokens=16, max_context=256)


@pytest.fixture(scope="module")
def oracle_tokenizer(model_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_path.parent, gguf_file=model_path.name)


@pytest.fixture(scope="module")
def answers(model_path: Path, tokenizer_and_runner: tuple[Tokenizer, Runner]) -> list[Answer]:
    tokenizer, _ = tokenizer_and_runner
    model = AutoModelForCausalLM.from_pretrained(model_path.parent, gguf_file=model_path.name, dtype=torch.float32)
    model.eval()
    texts = [tokenizer.render_chat([{"role": "user", "content": chat}]) for chat in CHATS] + COMPLETIONS
    return [_ask(model, tokenizer.encode(text)) for text in texts]


def _ask(oracle: Any, prompt: list[int]) -> Answer:
    answer = Answer(prompt, [], [])
    new, cache = prompt, None
    with torch.inference_mode():
        for _ in range(NEW_TOKENS):
            output = oracle(torch.tensor([new]), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            best = output.logits[0, -1].topk(2)
            answer.tokens.append(int(best.indices[0]))
            answer.margins.append(float(best.values[0] - best.values[1]))
            new = answer.tokens[-1:]
    return answer


def _generate(runner: Runner, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Greedy, all prompts side by side, prefilled two at a time so that prefill and decode share iterations."""
    new = dict(enumerate(prompts))
    held = [0] * len(prompts)
    tokens: list[list[int]] = [[] for _ in prompts]
    started = 0
    while min(len(t) for t in tokens) < NEW_TOKENS:
        started = min(started + 2, len(prompts))
        running = [i for i in range(started) if len(tokens[i]) < NEW_TOKENS]
        # Interleaved: block j of sequence i is j * prompts + i.
        batch = [StepItem(range(i, 20 * 16, len(prompts)), new[i], held[i], True) for i in running]
        for i, token in zip(running, runner.step(batch).token_ids, strict=True):
            assert token is not None
            held[i] += len(new[i])
            tokens[i].append(token)
            new[i] = [token]
    return tokens


def _compare(label: str, answers: Sequence[Answer], ours: Sequence[list[int]]) -> Iterator[str]:
    """Yields one line per difference, and prints the figures."""
    equal = compared = stopped = 0
    for number, (answer, tokens) in enumerate(zip(answers, ours, strict=True)):
        close = next((i for i, margin in enumerate(answer.margins) if margin < MARGIN), NEW_TOKENS)
        stopped += close < NEW_TOKENS
        compared += close
        differs = next((i for i in range(close) if tokens[i] != answer.tokens[i]), None)
        if differs is None:
            equal += 1
        else:
            yield (
                f"prompt {number}: token {differs} is {tokens[differs]}, the oracle's {answer.tokens[differs]} "
                f"by a margin of {answer.margins[differs]:.4f}"
            )
    print(  # the figures are read with `pytest -s`
        f"\n{label}: {equal} of {len(answers)} prompts equal, {compared} tokens compared, "
        f"{stopped} stopped early by a margin under {MARGIN}"
    )


def test_greedy_answers_alone_equal_the_oracles(
    answers: list[Answer], tokenizer_and_runner: tuple[Tokenizer, Runner]
) -> None:
    _, runner = tokenizer_and_runner
    ours = [_generate(runner, [answer.prompt])[0] for answer in answers]
    assert list(_compare("alone", answers, ours)) == []


def test_greedy_answers_in_a_batch_equal_the_oracles(
    answers: list[Answer], tokenizer_and_runner: tuple[Tokenizer, Runner]
) -> None:
    _, runner = tokenizer_and_runner
    ours = _generate(runner, [answer.prompt for answer in answers])
    assert list(_compare("in a batch", answers, ours)) == []


def _serve(runner: Runner, answers: Sequence[Answer]) -> tuple[list[list[int]], dict[str, int]]:
    """The same prompts through the scheduler, twice, with everything on that moves KV about: prompts in chunks of 7
    tokens, equal beginnings reused, and a pool that is too small for what it lets in."""
    policies = Policies(reservation=Optimistic(), budget=Static(7))
    scheduler = Scheduler(Limits(slots=8, max_context=256), BlockPool(24, 16, prefix_reuse=True), (), policies)
    requests = [Request(str(i), answer.prompt, NEW_TOKENS) for i, answer in enumerate([*answers, *answers])]
    for request in requests:
        assert scheduler.submit(request, 0) is None
    seen = {"steps": 0, "chunked": 0, "preempted": 0, "reused_tokens": 0}
    while scheduler.has_work:
        plan = scheduler.plan(seen["steps"])
        result = runner.step(plan.items)
        seen["steps"] += 1
        seen["preempted"] += len(plan.preempted)
        seen["reused_tokens"] += plan.reused
        seen["chunked"] += sum(not item.sample for item in plan.items)
        scheduler.apply(plan, result.token_ids, seen["steps"])
        scheduler.check_integrity()
    return [request.output for request in requests], seen


def test_greedy_answers_with_chunks_preemption_and_reused_kv_equal_the_oracles(
    answers: list[Answer], tokenizer_and_runner: tuple[Tokenizer, Runner]
) -> None:
    _, runner = tokenizer_and_runner
    ours, seen = _serve(runner, answers)
    differences = list(_compare("chunked, preempted and reused", [*answers, *answers], ours))
    print(seen)
    assert differences == []
    assert min(seen.values()) > 0, "something that was to be tested did not happen"


def test_most_tokens_were_compared_and_not_stopped_by_the_margin(answers: list[Answer]) -> None:
    compared = sum(next((i for i, margin in enumerate(a.margins) if margin < MARGIN), NEW_TOKENS) for a in answers)
    assert compared >= len(answers) * NEW_TOKENS * 0.8


TEXTS = [
    "Hello, world!",
    "naïve façade — “quotes” … and 日本語, عربى, हिन्दी, 😀👩‍👩‍👧",
    "tabs\tand\n\nnewlines \r\n  indented\n",
    "it's we'll they've I'd DON'T",
    "3.14159 x10 2024-11-29 1,000,000 a1b2",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "def f(x):\n    return x**2  # square\n",
    "",
    " ",
    "   trailing and leading   ",
    "https://example.org/a?b=c&d=%20e",
    "\x00\x01 control \u200b zero width \ufeff",
]


def test_token_ids_and_text_equal_the_oracle_tokenizers(
    oracle_tokenizer: Any, tokenizer_and_runner: tuple[Tokenizer, Runner]
) -> None:
    tokenizer, _ = tokenizer_and_runner
    for text in [*TEXTS, *CHATS, *COMPLETIONS]:
        ids = tokenizer.encode(text)
        assert ids == oracle_tokenizer.encode(text), text
        # The oracle's spaces are left as they are, and control tokens leave nothing on either side.
        expected = oracle_tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert tokenizer.decode(ids) == expected, text
        stream = tokenizer.text_stream()
        assert "".join([*(stream.push(i) for i in ids), stream.finish()]) == expected


def test_spaces_before_a_digit_follow_the_models_own_pre_tokenizer(
    oracle_tokenizer: Any, tokenizer_and_runner: tuple[Tokenizer, Runner]
) -> None:
    """The file says `smollm`: digits are cut off first, so that two spaces before one stay together.

    `transformers` reads GGUF files with GPT-2's rule whatever they say, and splits them.
    """
    tokenizer, _ = tokenizer_and_runner
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("a  1 2")] == [b"a", b"  ", b"1", b" ", b"2"]
    assert len(oracle_tokenizer.encode("a  1 2")) == 6


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "Hi"}],
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": "Bye\n"},
        ],
    ],
)
def test_chat_prompts_equal_the_oracles(
    messages: list[dict[str, str]], oracle_tokenizer: Any, tokenizer_and_runner: tuple[Tokenizer, Runner]
) -> None:
    tokenizer, _ = tokenizer_and_runner
    expected = oracle_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.render_chat(messages) == expected
