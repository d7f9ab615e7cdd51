"""How long a step takes: a non-negative linear function of what is in it, fitted to recorded steps. Pure.

    t = base + a · prefill tokens + b · decode tokens + c · KV positions read + d · prefill pairs

`base` holds what every step pays: streaming the weights, launching kernels, planning. `d` is prefill attention, which
grows with the square of a prompt: at some thousand tokens it outweighs the matrix products. No term can be negative,
since more work never takes less time; without that bound a fit to correlated features makes predictions that fall as
the batch grows.

A fit minimises the squared *relative* residuals, (predicted - real) / real: each step counts the same, whether it takes
one millisecond or a second, and a stall of any length pulls less than a step that is off by a few percent, since the
residual of a step that took too long is never beyond -1 and its row is divided by the long time. Such a fit predicts
too short where steps scatter, by about twice the variance of the relative scatter, since short steps weigh more. So the
coefficients are then scaled together until the predicted time of the steps is the real one in sum.
"""

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import combinations
from math import ceil, inf
from statistics import median
from typing import NamedTuple

from reference_server.step_types import StepItem
from reference_server.work import attended_pairs
from sloscope.errors import ConfigError

FEATURES = 5
TRIMMED = 0.1  # of each kind of step, those that fit worst
TRIMMING_PASSES = 3
MAX_COST_NS = 1e15  # of one unit of work; eleven days are no step time
STALL = 3.0  # online, what a step took beyond this many times the prediction is no part of the level
SINGULAR = 1e-9  # pivot of a matrix whose diagonal is 1


class StepShape(NamedTuple):
    """`kv_read_tokens`: positions attended, summed over sequences. `prefill_pairs`: pairs of a prompt token and a
    position that it attends (work.attended_pairs).
    """

    prefill_tokens: int
    decode_tokens: int
    kv_read_tokens: int
    prefill_pairs: int = 0


class Sample(NamedTuple):
    shape: StepShape
    duration_ns: int


class FitError(NamedTuple):
    """Of predicted / real - 1 over n steps: the median and the 90th percentile (nearest rank) of its size, and in
    `bias` the sign: total predicted over total real time - 1. None without steps.
    """

    n: int
    median: float | None
    p90: float | None
    bias: float | None


@dataclass(frozen=True, slots=True)
class CostModel:
    """Nanoseconds, in the order of the features."""

    base_ns: float
    prefill_token_ns: float
    decode_token_ns: float
    kv_read_token_ns: float
    prefill_pair_ns: float = 0.0

    def step_ns(self, shape: StepShape) -> int:
        prefill, decode, kv_read, pairs = shape
        return round(
            self.base_ns
            + self.prefill_token_ns * prefill
            + self.decode_token_ns * decode
            + self.kv_read_token_ns * kv_read
            + self.prefill_pair_ns * pairs
        )

    def scaled(self, factor: float) -> "CostModel":
        return CostModel(*(factor * value for value in asdict(self).values()))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "CostModel":
        """ConfigError names the field, the value and what is accepted."""
        names = [field.name for field in fields(cls)]
        try:
            body = json.loads(text)
        except (ValueError, RecursionError):
            raise ConfigError("cost model: not JSON; accepted: what `sloscope model fit --out` writes") from None
        if not isinstance(body, dict) or set(body) != set(names):
            found = ", ".join(sorted(body))[:200] if isinstance(body, dict) else type(body).__name__
            raise ConfigError(f"cost model: fields {found}; accepted: exactly {', '.join(names)}")
        for name, value in body.items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not 0 <= value <= MAX_COST_NS:
                accepted = f"nanoseconds, 0 to {MAX_COST_NS:g}"
                raise ConfigError(f"cost model: {name}: {str(value)[:40]}; accepted: {accepted}")
        return cls(**{name: float(value) for name, value in body.items()})


def shape_of(items: Sequence[StepItem], decodes: int) -> StepShape:
    """The first `decodes` items are decodes, the rest is prefill."""
    prefills = items[decodes:]
    return StepShape(
        prefill_tokens=sum(len(item.token_ids) for item in prefills),
        decode_tokens=decodes,
        kv_read_tokens=sum(item.position0 + len(item.token_ids) for item in items),
        prefill_pairs=sum(attended_pairs(item.position0, len(item.token_ids)) for item in prefills),
    )


def error_of(model: CostModel, samples: Iterable[Sample]) -> FitError:
    predicted_ns = real_ns = 0
    sizes = []
    for shape, duration_ns in samples:
        step_ns = model.step_ns(shape)
        predicted_ns += step_ns
        real_ns += duration_ns
        sizes.append(abs(step_ns / duration_ns - 1))
    return _fit_error(sizes, predicted_ns / real_ns - 1 if real_ns else None)


def _fit_error(sizes: list[float], bias: float | None) -> FitError:
    if not sizes:
        return FitError(0, None, None, None)
    sizes.sort()
    return FitError(len(sizes), sizes[ceil(0.5 * len(sizes)) - 1], sizes[ceil(0.9 * len(sizes)) - 1], bias)


def fit(samples: Sequence[Sample]) -> tuple[CostModel, FitError]:
    """The model, and its error over the same samples, none left out.

    After a first pass over all, three more each leave out the tenth that is off by the largest factor (least trimmed
    squares by concentration steps: Rousseeuw and Van Driessen 2006, doi:10.1007/s10618-005-0024-4): stalls have causes
    that are not in the shape. Steps with and without prefill are trimmed apart, so that the rarer kind is not taken for
    outliers. A feature that is 0 in every sample gets the coefficient 0: the caller brings samples that show what it
    wants to know.
    """
    assert samples and all(sample.duration_ns > 0 for sample in samples)
    kept: Sequence[Sample] = samples
    model = _fit_once(kept)
    for _ in range(TRIMMING_PASSES):
        middle = model.scaled(median(ns / max(1, model.step_ns(shape)) for shape, ns in kept))
        kept = [*_trim(middle, samples, prefill=False), *_trim(middle, samples, prefill=True)]
        model = _fit_once(kept)
    predicted_ns = sum(model.step_ns(shape) for shape, _ in kept)
    model = model.scaled(sum(ns for _, ns in kept) / max(1, predicted_ns))
    return model, error_of(model, samples)


def _fit_once(samples: Iterable[Sample]) -> CostModel:
    sums = _Sums()
    for sample in samples:
        sums.add(sample)
    return CostModel(*_solve_non_negative(sums.matrix, sums.vector))


def _trim(model: CostModel, samples: Iterable[Sample], prefill: bool) -> list[Sample]:
    kind = [sample for sample in samples if (sample.shape.prefill_tokens > 0) == prefill]
    kind.sort(key=lambda sample: _factor(model.step_ns(sample.shape), sample.duration_ns))
    return kind[: len(kind) - int(TRIMMED * len(kind))]


def _factor(predicted_ns: float, real_ns: int) -> float:
    """How far apart the two are, 1 where they agree."""
    return max(predicted_ns / real_ns, real_ns / predicted_ns) if predicted_ns > 0 else inf


class _Sums:
    """Normal equations of the relative residuals: rows are features / duration, the right side is 1."""

    __slots__ = ("matrix", "n", "vector")

    def __init__(self) -> None:
        self.matrix = [[0.0] * FEATURES for _ in range(FEATURES)]
        self.vector = [0.0] * FEATURES
        self.n = 0.0

    def add(self, sample: Sample, keep: float = 1.0) -> None:
        """`keep`: what is left of the weight of all earlier samples."""
        inverse = 1.0 / sample.duration_ns
        row = (inverse, *(value * inverse for value in sample.shape))
        self.n = self.n * keep + 1
        for i, value in enumerate(row):
            self.vector[i] = self.vector[i] * keep + value
            line = self.matrix[i]
            for j in range(FEATURES):
                line[j] = line[j] * keep + value * row[j]


def _solve_non_negative(
    matrix: list[list[float]], vector: list[float], likely: tuple[int, ...] = tuple(range(FEATURES))
) -> list[float]:
    """argmin x'Ax - 2b'x over x ≥ 0, exactly: some subset of the features is above 0 in it and solves Ax = b among
    itself, and the gradient Ax - b is nowhere negative on the others (Karush, Kuhn and Tucker). Five features have 31
    subsets; `likely` is tried first.
    """
    scale = [line[i] ** 0.5 for i, line in enumerate(matrix)]
    seen = [i for i in range(FEATURES) if scale[i] > 0]
    target = {i: vector[i] / scale[i] for i in seen}
    scaled = {(i, j): matrix[i][j] / (scale[i] * scale[j]) for i in seen for j in seen}
    best, best_value = [0.0] * FEATURES, 0.0
    subsets = [tuple(i for i in likely if i in seen)]
    subsets += [chosen for size in range(len(seen), 0, -1) for chosen in combinations(seen, size)]
    for chosen in subsets:
        solution = _solve([[scaled[i, j] for j in chosen] for i in chosen], [target[i] for i in chosen])
        if not solution or min(solution) < 0:
            continue
        at = dict(zip(chosen, solution, strict=True))
        value = -sum(target[i] * x for i, x in at.items())
        if value < best_value:
            best_value, best = value, [at.get(i, 0.0) / (scale[i] or 1.0) for i in range(FEATURES)]
        others = [i for i in seen if i not in at]
        if all(sum(scaled[i, j] * x for j, x in at.items()) >= target[i] * (1 - SINGULAR) for i in others):
            return best
    return best  # rounding hid the sign of a gradient: the best of all subsets


def _solve(matrix: list[list[float]], vector: list[float]) -> list[float] | None:
    """Cholesky; None where features are so alike that their shares cannot be told apart."""
    n = len(vector)
    lower = [[0.0] * n for _ in range(n)]
    for i in range(n):
        for j in range(i + 1):
            rest = matrix[i][j] - sum(lower[i][k] * lower[j][k] for k in range(j))
            if i == j:
                if rest < SINGULAR:
                    return None
                lower[i][i] = rest**0.5
            else:
                lower[i][j] = rest / lower[j][j]
    x = [0.0] * n
    for i in range(n):
        x[i] = (vector[i] - sum(lower[i][k] * x[k] for k in range(i))) / lower[i][i]
    for i in reversed(range(n)):
        x[i] = (x[i] - sum(lower[k][i] * x[k] for k in range(i + 1, n))) / lower[i][i]
    return x


class OnlineFit:
    """The model of the latest steps: least squares with exponential forgetting, in memory that does not grow.

    Steps with prefill and steps without it forget apart, each when one of its own kind comes: an hour of decodes does
    not wear away what a prompt token costs. `prior` counts as `prior_steps` steps in each coefficient, and stands alone
    where the steps say nothing, such as for prefill before the first prompt. Without a prior `model` is None until
    `warm_up` steps have been seen and both kinds among them.

    `observe` takes some 20 µs, and every `refit_every` steps 100 µs more.
    """

    def __init__(
        self,
        prior: CostModel | None = None,
        prior_steps: float = 8.0,
        memory_steps: int = 1024,
        warm_up: int = 32,
        refit_every: int = 32,
        error_steps: int = 256,
    ) -> None:
        assert prior_steps > 0 and memory_steps > 1 and warm_up >= 1 and refit_every >= 1 and error_steps >= 1
        self._prior = prior
        self._prior_steps = prior_steps
        self._keep = 1 - 1 / memory_steps
        self._warm_up = warm_up
        self._refit_every = refit_every
        self._decodes, self._prefills = _Sums(), _Sums()
        self._model = prior
        self._totals = [0.0] * FEATURES  # what was run and how long it took, forgetting as the fit does
        self._real_ns = 0.0
        self._likely = tuple(range(FEATURES))  # what was above 0 the last time
        self._new = 0  # steps since the model was solved
        self._recent: deque[tuple[int, int]] = deque(maxlen=error_steps)  # predicted, real
        self.steps = 0

    def observe(self, shape: StepShape, duration_ns: int) -> None:
        """One step as it was. The prediction made before it goes into `error`."""
        assert duration_ns > 0
        model = self.model
        counted_ns: float = duration_ns
        if model is not None:
            predicted_ns = model.step_ns(shape)
            self._recent.append((predicted_ns, duration_ns))
            if predicted_ns and self.steps >= self._warm_up:
                counted_ns = min(duration_ns, STALL * predicted_ns)
        self._real_ns = self._real_ns * self._keep + counted_ns
        self._totals = [total * self._keep + x for total, x in zip(self._totals, (1, *shape), strict=True)]
        kind = self._prefills if shape.prefill_tokens else self._decodes
        kind.add(Sample(shape, duration_ns), self._keep)
        self.steps += 1
        self._new += 1

    @property
    def model(self) -> CostModel | None:
        # At the start every few steps teach much; later one more changes little, and solving takes 100 µs.
        if self._new and self._new >= min(self._refit_every, 1 + self.steps // 8) and self._ready:
            self._model, self._new = self._refit(), 0
        return self._model

    @property
    def _ready(self) -> bool:
        both = self._decodes.n > 0 and self._prefills.n > 0
        return self._prior is not None or (both and self.steps >= self._warm_up)

    def _refit(self) -> CostModel:
        a, b = self._decodes, self._prefills
        matrix = [[x + y for x, y in zip(p, q, strict=True)] for p, q in zip(a.matrix, b.matrix, strict=True)]
        vector = [x + y for x, y in zip(a.vector, b.vector, strict=True)]
        if self._prior is not None:
            n = a.n + b.n
            for i, value in enumerate(asdict(self._prior).values()):
                # As much as prior_steps steps of the size that this feature usually has; any weight where it was never
                # seen.
                weight = self._prior_steps * matrix[i][i] / n or 1.0
                matrix[i][i] += weight
                vector[i] += weight * value
        values = _solve_non_negative(matrix, vector, self._likely)
        self._likely = tuple(i for i, value in enumerate(values) if value > 0)
        predicted_ns = sum(value * total for value, total in zip(values, self._totals, strict=True))
        return CostModel(*values).scaled(self._real_ns / predicted_ns if predicted_ns > 0 else 1.0)

    def error(self) -> FitError:
        """Of the latest predictions, each made before its step ran."""
        predicted, real = sum(p for p, _ in self._recent), sum(r for _, r in self._recent)
        return _fit_error([abs(p / r - 1) for p, r in self._recent], predicted / real - 1 if real else None)
