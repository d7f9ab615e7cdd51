"""The built-in model: a small Llama with random weights, made from a seed when it is needed. Nothing is downloaded.

Its layers, tensors and KV are real and cost real time; what it says is word salad. Two things keep it usable as a
load target:
- Only whole words and punctuation can be chosen (`output_mask`), so every token is visible text. Prompts may be
  any text: the vocabulary holds all 256 bytes.
- A random model has no idea when to end, so the end token is masked unless a request asks for it; answers end by
  max_tokens, a stop string or `x-sloscope-stop-after`.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from reference_server.model import tensor_shapes
from reference_server.model_config import ModelConfig
from reference_server.tokenizer import TokenizerSpec, byte_alphabet, find_end_tokens
from reference_server.weights import Checkpoint

SEED = 20_260_101
CONTROL_TOKENS = ("<|begin|>", "<|end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|begin|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|begin|>assistant\n' }}{% endif %}"
)
PUNCTUATION = ".,;:!?"
WORD_LIST = """
a about above after again air all along also always an and answer any are around as ask at away back be because been
before began below between blue both bridge bright but by call came can carry change city clear clock cold come
could count cross dark day did do does door down each early earth east end enough even every far few field find fire
first five follow for forest found four from garden gave give go gold good great green had half hand has have he her
here high hill his home hour house how if in into is it just keep kind know lake land large last late learn leave
left letter light like line little long look made make many may mean might mile moon more morning most mountain move
much must name near never new next night no north not now number of off old on once one only open or other our out
over own paper part pass path place plain point quick quiet rain read red rest right ring river road rock room round
run said same sand saw say sea second see seem seven she short should show side silver sing sky slow small snow so
some song soon sound south space stand star start stay still stone stop story street such summer sun take talk tell
ten than that the their them then there these they thing think this three through time to together told tree turn
two under until up us use very voice wait walk wall want was watch water way we well went were west what when where
which while white who why wide will wind window winter with wood word work world would write year yellow yes yet you
young your
"""
WORDS = tuple(WORD_LIST.split())


def _vocabulary() -> tuple[list[str], list[str], list[int]]:
    """Tokens, merges, and the ids that may be chosen."""
    tokens = [*CONTROL_TOKENS, *byte_alphabet()]
    merges = []
    known = set(tokens)
    for word in WORDS:
        # "Ġ" stands for the space before a word. Each merge adds one letter, so every beginning is a token too.
        piece = "Ġ"
        for letter in word:
            if piece + letter not in known:
                known.add(piece + letter)
                tokens.append(piece + letter)
                merges.append(f"{piece} {letter}")
            piece += letter
    ids = {token: i for i, token in enumerate(tokens)}
    return tokens, merges, [ids[f"Ġ{word}"] for word in WORDS] + [ids[mark] for mark in PUNCTUATION]


@dataclass(frozen=True, slots=True)
class Size:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int


# `builtin` is for tests: an iteration takes about a millisecond. The larger one takes long enough on a CPU that the
# jitter of a busy machine is small beside it, which a demonstration of gaps needs.
SIZES = {
    "builtin": Size(layers=4, hidden=128, heads=4, kv_heads=2, intermediate=384),
    "builtin-14m": Size(layers=8, hidden=384, heads=6, kv_heads=2, intermediate=1024),
}


def make_builtin(dtype: torch.dtype = torch.float32, seed: int = SEED, name: str = "builtin") -> Checkpoint:
    """The same seed gives the same weights everywhere."""
    size = SIZES[name]
    tokens, merges, may_choose = _vocabulary()
    control_ids = frozenset(range(len(CONTROL_TOKENS)))
    eos_ids = find_end_tokens(tokens, control_ids, ())
    config = ModelConfig(
        layers=size.layers,
        hidden=size.hidden,
        heads=size.heads,
        kv_heads=size.kv_heads,
        head_dim=size.hidden // size.heads,
        intermediate=size.intermediate,
        vocab=len(tokens),
        rope_theta=10_000.0,
        norm_eps=1e-5,
        tie_embeddings=False,
        max_context=8192,
        bos_id=None,
        eos_ids=eos_ids,
    )
    output_mask = torch.full((config.vocab,), float("-inf"))
    output_mask[[*may_choose, *eos_ids]] = 0.0
    tokenizer = TokenizerSpec(
        tokens=tuple(tokens),
        merges=tuple(merges),
        control_ids=control_ids,
        pre="gpt-2",
        bos_id=None,
        eos_ids=eos_ids,
        add_bos=False,
        chat_template=CHAT_TEMPLATE,
    )
    return Checkpoint(config, random_state(config, seed, dtype), tokenizer, output_mask, mask_eos=True)


# Logits spread over several units, so that sampling prefers some words. Attention that is sharp and weighs as much
# as the last token keeps a greedy answer from running in a circle of a few words.
_EMPHASIS = {"lm_head": 2.5, "q_proj": 2.0, "k_proj": 2.0, "o_proj": 3.0}


def random_state(config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Normal weights scaled so that activations keep their size through the layers; norms are 1."""
    random = np.random.Generator(np.random.Philox(key=seed))
    state = {}
    for name, shape in tensor_shapes(config).items():
        if len(shape) == 1:
            values = np.ones(shape, dtype=np.float32)
        else:
            scale = 1.0 if name == "model.embed_tokens.weight" else shape[1] ** -0.5
            scale *= next((factor for part, factor in _EMPHASIS.items() if part in name), 1.0)
            values = random.standard_normal(shape, dtype=np.float32) * np.float32(scale)
        state[name] = torch.from_numpy(values).to(dtype)
    return state
