import json
import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_server.cost_model import (
    CostModel,
    FitError,
    OnlineFit,
    Sample,
    StepShape,
    _solve_non_negative,
    error_of,
    fit,
    shape_of,
)
from reference_server.step_types import StepItem
from sloscope.errors import ConfigError

TRUE = CostModel(
    base_ns=2_000_000, prefill_token_ns=50_000, decode_token_ns=100_000, kv_read_token_ns=200, prefill_pair_ns=20
)


def steps(n: int, seed: int = 1, model: CostModel = TRUE, prefill_share: float = 0.3) -> list[Sample]:
    """Exact samples of the model: what a busy engine would do."""
    draw = random.Random(seed)
    made = []
    for _ in range(n):
        decodes = draw.randint(0, 16)
        prefill = draw.randint(1, 256) if draw.random() < prefill_share or not decodes else 0
        start = draw.randint(0, 1000) if prefill else 0
        kv_read = sum(draw.randint(10, 800) for _ in range(decodes)) + start + prefill
        shape = StepShape(prefill, decodes, kv_read, prefill * start + prefill * (prefill + 1) // 2)
        made.append(Sample(shape, model.step_ns(shape)))
    return made


def with_noise(samples: list[Sample], share: float, seed: int = 2) -> list[Sample]:
    draw = random.Random(seed)
    return [Sample(shape, round(ns * draw.uniform(1 - share, 1 + share))) for shape, ns in samples]


def assert_near(model: CostModel | None, truth: CostModel, share: float) -> None:
    assert model is not None
    for name in truth.__slots__:
        assert getattr(model, name) == pytest.approx(getattr(truth, name), rel=share), name


def test_a_step_takes_the_sum_of_its_terms() -> None:
    # 2 ms + 64 · 50 µs + 3 · 100 µs + 500 · 200 ns + 1000 · 20 ns = 2 + 3.2 + 0.3 + 0.1 + 0.02 ms
    assert TRUE.step_ns(StepShape(64, 3, 500, 1000)) == 5_620_000


def test_the_shape_of_a_step_tells_decodes_from_prefill() -> None:
    decode = StepItem(range(9), [7], position0=99, sample=True)
    piece = StepItem(range(9), [1, 2, 3], position0=10, sample=False)
    # Positions read: 100 + 13. Pairs of the piece: 11 + 12 + 13.
    assert shape_of([decode, piece], decodes=1) == StepShape(3, 1, 113, 36)


def test_exact_steps_give_back_the_model() -> None:
    model, error = fit(steps(200))
    assert_near(model, TRUE, 1e-6)
    assert error.n == 200 and error.p90 is not None and error.p90 < 1e-6


def test_noise_averages_out() -> None:
    model, error = fit(with_noise(steps(5_000), 0.1))
    assert_near(model, TRUE, 0.1)
    # Uniform noise of ±10 %: half of the errors are below 5 %, nine tenths below 9 %.
    assert error.median == pytest.approx(0.05, abs=0.01) and error.p90 == pytest.approx(0.09, abs=0.01)
    assert error.bias == pytest.approx(0, abs=0.01)


def test_stalls_do_not_move_the_fit_and_stay_in_the_error() -> None:
    samples = steps(1_000)
    stalled = [Sample(s, ns * 20) if i % 20 == 0 else Sample(s, ns) for i, (s, ns) in enumerate(samples)]
    model, error = fit(stalled)
    assert_near(model, TRUE, 1e-3)
    assert error.n == 1_000 and error.bias is not None
    # A twentieth of the steps took 20 times as long, so about 1 / (0.95 + 0.05 · 20) of the time was predicted.
    assert error.bias == pytest.approx(1 / 1.95 - 1, abs=0.05)


def test_rare_prefill_that_fits_worse_is_not_trimmed_away_as_an_outlier() -> None:
    decodes = [s for s in steps(2_000, prefill_share=0) if not s.shape.prefill_tokens]
    prefills = with_noise([s for s in steps(100, seed=5, prefill_share=1) if s.shape.prefill_tokens][:60], 0.15)
    model, _ = fit(decodes + prefills)
    assert model.prefill_token_ns == pytest.approx(TRUE.prefill_token_ns, rel=0.15)


def scattered(samples: list[Sample], sigma: float, seed: int = 6) -> list[Sample]:
    """Lognormal: the mean is exp(sigma² / 2) times the median."""
    draw = random.Random(seed)
    return [Sample(shape, round(ns * draw.lognormvariate(0, sigma))) for shape, ns in samples]


def test_scatter_does_not_make_predictions_short() -> None:
    _, error = fit(scattered(steps(5_000), 0.3))
    # Without scaling it would be some 2 · 0.3² = 18 % short; trimming the slowest leaves a few percent.
    assert error.bias is not None and -0.05 < error.bias < 0.05


def test_online_scatter_does_not_make_predictions_short() -> None:
    online = OnlineFit()
    feed(online, scattered(steps(5_000), 0.3))
    model = online.model
    assert model is not None
    bias = error_of(model, scattered(steps(5_000, seed=8), 0.3, seed=9)).bias
    assert bias is not None and -0.05 < bias < 0.05


def test_a_negative_effect_is_fitted_as_none() -> None:
    # Time falls with the number of decodes: the best line that may not fall is flat.
    falling = [Sample(StepShape(0, n, 0), 1_000_000 - 10_000 * n) for n in range(1, 17)]
    model, _ = fit(falling)
    assert model.decode_token_ns == 0 and model.base_ns > 0


def test_a_feature_that_never_varies_apart_does_not_break_the_fit() -> None:
    # Positions read are always 100 a decode: the two cannot be told apart, but their sum can.
    samples = [Sample(StepShape(0, n, 100 * n), 1_000_000 + 30_000 * n) for n in range(1, 17)]
    model, error = fit(samples)
    assert error.p90 is not None and error.p90 < 1e-6
    assert model.decode_token_ns + 100 * model.kv_read_token_ns == pytest.approx(30_000)


MATRIX_ENTRY = st.floats(-3, 3).map(lambda x: round(x, 3))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(*[MATRIX_ENTRY] * 6), min_size=6, max_size=12))
def test_no_nearby_non_negative_point_is_better_than_the_solution(rows: list[tuple[float, ...]]) -> None:
    """Rows of features and a right side; the objective is convex, so no better neighbour means the minimum."""
    matrix = [[sum(r[i] * r[j] for r in rows) for j in range(5)] for i in range(5)]
    vector = [sum(r[i] * r[5] for r in rows) for i in range(5)]

    def objective(x: list[float]) -> float:
        return sum((sum(r[i] * x[i] for i in range(5)) - r[5]) ** 2 for r in rows)

    solution = _solve_non_negative(matrix, vector)
    assert min(solution) >= 0
    at = objective(solution)
    for i, step in product(range(5), (-1e-3, 1e-3, 1e-2)):
        moved = [max(0.0, x + step * (j == i)) for j, x in enumerate(solution)]
        assert objective(moved) >= at - 1e-6 * (1 + at)


def test_error_quantiles_by_hand() -> None:
    model = CostModel(1_000, 0, 0, 0)
    # Relative errors of a prediction of 1000: 1000/2000 - 1 = -0.5, 1000/1000 - 1 = 0, 1000/800 - 1 = 0.25.
    samples = [Sample(StepShape(0, 1, 1), ns) for ns in (2_000, 1_000, 800)]
    assert error_of(model, samples) == FitError(3, 0.25, 0.5, pytest.approx(3_000 / 3_800 - 1))
    assert error_of(model, []) == FitError(0, None, None, None)


def test_json_gives_back_the_same_model() -> None:
    assert CostModel.from_json(TRUE.to_json()) == TRUE


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "fields list"),
        (json.dumps({"base_ns": 1}), "fields base_ns; accepted: exactly base_ns, prefill_token_ns"),
        (TRUE.to_json().replace("50000", "-1"), "prefill_token_ns: -1; accepted: nanoseconds, 0 to 1e+15"),
        (TRUE.to_json().replace("50000", "1e300"), "prefill_token_ns: 1e+300; accepted: nanoseconds, 0 to 1e+15"),
        (TRUE.to_json().replace("50000", "NaN"), "prefill_token_ns: nan"),
        (TRUE.to_json().replace("50000", "true"), "prefill_token_ns: True"),
        (TRUE.to_json().replace("50000", '"fast"'), "prefill_token_ns: fast"),
    ],
)
def test_a_model_that_is_none_is_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CostModel.from_json(text)
    assert said in str(caught.value) and "\n" not in str(caught.value)


# --- online


def feed(online: OnlineFit, samples: list[Sample]) -> None:
    for sample in samples:
        online.observe(*sample)


def test_without_a_prior_there_is_no_model_before_both_kinds_of_step_were_seen() -> None:
    online = OnlineFit(warm_up=4)
    feed(online, [s for s in steps(100) if not s.shape.prefill_tokens])
    assert online.model is None and online.error().n == 0
    feed(online, [s for s in steps(100) if s.shape.prefill_tokens][:1])
    assert online.model is not None


def test_online_steps_lead_to_the_model() -> None:
    online = OnlineFit()
    feed(online, steps(1_000))
    assert_near(online.model, TRUE, 1e-3)
    error = online.error()
    assert error.n == 256 and error.p90 is not None and error.p90 < 1e-3


def test_a_machine_that_became_twice_as_slow_is_followed() -> None:
    online = OnlineFit(memory_steps=100)
    feed(online, steps(1_000))
    slow = CostModel(4_000_000, 100_000, 200_000, 400, 40)
    feed(online, steps(3_000, seed=3, model=slow))  # some 1,000 with prefill: ten times the memory
    assert_near(online.model, slow, 0.02)


def test_a_long_run_of_decodes_keeps_what_a_prompt_token_costs() -> None:
    online = OnlineFit(memory_steps=100)
    feed(online, steps(500))
    feed(online, steps(5_000, seed=4, prefill_share=0))
    assert_near(online.model, TRUE, 0.02)


def test_the_prior_stands_where_nothing_was_seen_and_gives_way_where_something_was() -> None:
    prior = CostModel(1_000_000, 70_000, 90_000, 300, 25)
    online = OnlineFit(prior)
    assert online.model is prior
    decodes = [s for s in steps(2_000, prefill_share=0) if not s.shape.prefill_tokens]
    feed(online, decodes)
    model = online.model
    assert model is not None
    assert (model.prefill_token_ns, model.prefill_pair_ns) == pytest.approx((70_000, 25), rel=0.01)
    before, after = error_of(prior, decodes).p90, error_of(model, decodes).p90
    assert before is not None and before > 0.1 and after is not None and after < 0.02


@pytest.mark.parametrize("wrong", [0.1, 10])
def test_a_prior_of_another_machine_is_outweighed_in_some_hundred_steps(wrong: float) -> None:
    online = OnlineFit(TRUE.scaled(wrong))
    feed(online, steps(300))
    model = online.model
    assert model is not None
    error = error_of(model, steps(300, seed=7))
    assert error.p90 is not None and error.p90 < 0.2 and error.bias is not None and abs(error.bias) < 0.1


def test_online_stalls_pull_little() -> None:
    online = OnlineFit()
    samples = steps(2_000)
    feed(online, [Sample(s, ns * 50) if i % 50 == 0 else Sample(s, ns) for i, (s, ns) in enumerate(samples)])
    model = online.model
    assert model is not None
    quiet = error_of(model, samples)
    # A fiftieth of the steps counts three times in the level, which is 4 % more.
    assert quiet.p90 is not None and quiet.p90 < 0.05


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.builds(
            Sample,
            st.builds(
                StepShape,
                st.integers(0, 4096),
                st.integers(0, 64),
                st.integers(0, 10**6),
                st.integers(0, 10**8),
            ),
            st.integers(1, 10**11),
        ),
        max_size=80,
    )
)
def test_whatever_the_steps_the_model_is_never_negative(samples: list[Sample]) -> None:
    online = OnlineFit(CostModel(1, 1, 1, 1, 1), refit_every=1)
    feed(online, samples)
    model = online.model
    assert model is not None
    for name in model.__slots__:
        assert 0 <= getattr(model, name) < float("inf"), name
