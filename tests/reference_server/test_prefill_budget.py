from hypothesis import given
from hypothesis import strategies as st

from reference_server.cost_model import CostModel, StepShape
from reference_server.prefill_budget import DecodeSlack, Static, shape_with
from reference_server.request import Request
from sloscope.units import NS_PER

MS = NS_PER["ms"]
US = NS_PER["us"]
NOW = 1_000 * MS
# A step takes 2 ms, and 100 µs more for each prompt token, 500 µs for each decode.
MODEL = CostModel(base_ns=2 * MS, prefill_token_ns=100 * US, decode_token_ns=500 * US, kv_read_token_ns=0)


def decode(since_ms: int = 0, limit_ms: int | None = 30, streaming: bool = True, tokens: int = 10) -> Request:
    """Its latest token came `since_ms` ago."""
    request = Request("d", [1] * tokens, max_tokens=5, streaming=streaming, output=[1], computed=tokens)
    request.itl_max_limit_ns = None if limit_ms is None else limit_ms * MS
    request.last_token_ns = NOW - since_ms * MS
    return request


def prompt(tokens: int = 4_000, computed: int = 0) -> Request:
    return Request("p", [1] * tokens, max_tokens=5, computed=computed)


def budget(
    minimum: int = 16,
    maximum: int | None = None,
    share: float = 1.0,
    default_gap_ms: int | None = None,
    model: CostModel | None = MODEL,
) -> DecodeSlack:
    gap_ns = None if default_gap_ms is None else default_gap_ms * MS
    return DecodeSlack(lambda: model, minimum, maximum, share, gap_ns)


def test_a_static_budget_is_the_same_whoever_runs() -> None:
    assert Static(64).tokens([decode()], [prompt()], NOW) == 64
    assert Static(None).tokens([decode()], [prompt()], NOW) is None


def test_the_chunk_fills_the_slack_to_the_token() -> None:
    # Due in 30 ms; the two decodes alone take 2 + 2 · 0.5 = 3 ms; 27 ms are 270 prompt tokens.
    assert budget().tokens([decode(), decode()], [prompt()], NOW) == 270


def test_prompts_get_their_share_of_the_slack() -> None:
    # A third of 27 ms.
    assert budget(share=1 / 3).tokens([decode(), decode()], [prompt()], NOW) == 90


def test_the_most_urgent_decode_counts() -> None:
    # It is due in 30 - 20 = 10 ms, of which 3 ms are the decodes' own.
    assert budget().tokens([decode(), decode(since_ms=20)], [prompt()], NOW) == 70


def test_a_lost_limit_still_lets_prompts_get_on() -> None:
    assert budget(minimum=8).tokens([decode(since_ms=40)], [prompt()], NOW) == 8


def test_the_maximum_bounds_a_large_slack() -> None:
    assert budget(maximum=128).tokens([decode(limit_ms=1_000)], [prompt()], NOW) == 128


def test_no_more_than_what_is_left_of_the_prompts() -> None:
    # 975 ms of slack, 100 + 50 tokens to run.
    assert budget().tokens([decode(limit_ms=1_000)], [prompt(100), prompt(80, computed=30)], NOW) == 150


def test_without_decodes_only_the_maximum_counts() -> None:
    assert budget().tokens([], [prompt()], NOW) is None
    assert budget(maximum=512).tokens([], [prompt()], NOW) == 512


def test_a_decode_without_a_limit_waits_the_default_gap_or_for_ever() -> None:
    free = decode(limit_ms=None)
    # 12.5 ms, of which 2.5 ms are its own.
    assert DecodeSlack(lambda: MODEL, share=1, default_gap_ns=12_500 * US).tokens([free], [prompt()], NOW) == 100
    assert budget().tokens([free], [prompt()], NOW) is None


def test_nobody_waits_for_the_next_token_of_an_answer_that_comes_whole() -> None:
    whole = decode(limit_ms=5, streaming=False)
    assert budget().tokens([whole], [prompt()], NOW) is None
    assert budget(default_gap_ms=52).tokens([whole, decode(limit_ms=None)], [prompt()], NOW) == 490


def test_without_a_model_yet_prompts_get_the_minimum() -> None:
    assert budget(minimum=24, model=None).tokens([decode()], [prompt()], NOW) == 24
    assert budget(minimum=24, model=None).tokens([], [prompt()], NOW) is None


def test_long_prompts_get_smaller_chunks_where_attention_costs() -> None:
    # 1 µs a pair. At position 0, n tokens are n(n + 1)/2 pairs: 0.1n + n(n + 1)/2000 ≤ 27.5 ms up to n = 155
    # (15.5 + 12.09 = 27.59 is too much; 154: 15.4 + 11.935 = 27.335 fits).
    model = CostModel(2 * MS, 100 * US, 500 * US, 0, prefill_pair_ns=1 * US)
    assert budget(model=model).tokens([decode()], [prompt()], NOW) == 154
    # At position 1000 a token has 1000 pairs more: 1.1n + n(n + 1)/2000 ≤ 27.5 up to n = 24 (26.4 + 0.3 = 26.7).
    assert budget(model=model, minimum=1).tokens([decode()], [prompt(computed=1_000)], NOW) == 24


def test_the_shape_gives_tokens_out_in_order() -> None:
    # Decode: 10 held and its new one. 30 tokens: the 20 that are left of the first prompt, read to its end at 100,
    # then 10 of the second at 0. Pairs: 81 + … + 100 = 1810, 1 + … + 10 = 55.
    shape = shape_with([decode(tokens=10)], [prompt(100, computed=80), prompt(50)], 30)
    assert shape == StepShape(30, 1, 11 + 100 + 10, 1_865)


def test_a_preempted_answer_is_run_again_with_its_output() -> None:
    again = Request("p", [1] * 10, max_tokens=9, output=[1, 1, 1])
    assert shape_with([], [again], 100).prefill_tokens == 13


COST = st.integers(0, 1_000_000)
MODELS = st.builds(CostModel, st.integers(0, 50_000_000), COST, COST, st.integers(0, 10_000), st.integers(0, 1_000))
DECODES = st.lists(
    st.builds(decode, st.integers(0, 200), st.one_of(st.none(), st.integers(1, 1_000)), st.booleans()), max_size=4
)
PROMPTS = st.lists(st.builds(prompt, st.integers(101, 3_000), st.integers(0, 100)), min_size=1, max_size=3)
BUDGETS = st.builds(
    lambda model, minimum, more, share, gap: DecodeSlack(
        lambda: model, minimum, None if more is None else minimum + more, share, gap
    ),
    MODELS,
    st.integers(1, 64),
    st.one_of(st.none(), st.integers(0, 2_000)),
    st.one_of(st.just(1.0), st.floats(0.01, 1)),
    st.one_of(st.none(), st.integers(1, 500 * MS)),
)


@given(BUDGETS, DECODES, PROMPTS, st.integers(0, 100 * MS))
def test_more_time_never_means_fewer_tokens(
    policy: DecodeSlack, decodes: list[Request], prompts: list[Request], later_ns: int
) -> None:
    early, late = policy.tokens(decodes, prompts, NOW), policy.tokens(decodes, prompts, NOW + later_ns)
    assert (early is None) == (late is None)
    assert early is None or late is None or late <= early


@given(BUDGETS, DECODES, PROMPTS)
def test_the_budget_is_within_its_bounds_and_the_largest_that_is_in_time(
    policy: DecodeSlack, decodes: list[Request], prompts: list[Request]
) -> None:
    tokens = policy.tokens(decodes, prompts, NOW)
    dues = [due for request in decodes if (due := policy._due_ns(request)) is not None]
    if not dues:
        assert tokens == policy.maximum
        return
    assert tokens is not None and tokens >= policy.minimum
    assert policy.maximum is None or tokens <= policy.maximum
    model = policy._model()
    assert model is not None

    def ends_ns(tokens: int) -> int:
        return NOW + model.step_ns(shape_with(decodes, prompts, tokens))

    if tokens > policy.minimum:
        assert ends_ns(tokens) <= min(dues)
    rest = sum(request.tokens - request.computed for request in prompts)
    if policy.share == 1 and tokens < rest and tokens != policy.maximum:
        assert ends_ns(tokens + 1) > min(dues)
