"""How many prompt tokens the next iteration may run beside its decodes. Pure.

A prompt that is run whole holds up every running answer for as long as it takes; in chunks it holds them up a little
each time, and takes longer itself, since each chunk pays for a step of its own.
"""

from collections.abc import Callable, Sequence

from reference_server.cost_model import CostModel, StepShape
from reference_server.request import Request
from reference_server.work import attended_pairs

# No flags: an operator says which gap is kept, and a smaller one leaves more to the model's error. The least budget
# only keeps prompts from standing still where a limit is lost already.
SHARE = 0.8
LEAST_TOKENS = 16


class Static:
    """The same bound in every step; None: whole prompts."""

    def __init__(self, prefill_tokens: int | None = None) -> None:
        assert prefill_tokens is None or prefill_tokens >= 1
        self.prefill_tokens = prefill_tokens

    def tokens(self, decodes: Sequence[Request], prefills: Sequence[Request], now_ns: int) -> int | None:
        return self.prefill_tokens


class DecodeSlack:
    """As many as the running answers can wait for.

    Each decode owes its next token by last_token_ns + its gap limit; where none is declared, or the answer is read
    only as a whole, `default_gap_ns` stands in (None: it may wait for ever). The slack is what the earliest of these
    leaves after a step of the decodes alone, by the cost model; prompts get `share` of it, the rest is for what the
    model does not know. The budget is the most tokens whose predicted step fits, at least `minimum`, so that prompts
    get on even where a limit is lost already, and at most `maximum` (None: whole prompts), which alone counts while
    nothing is decoded. Until there is a model the budget is `minimum`.

    `prefills` come in the order in which they get the budget. It takes O(prefills · log tokens) time.
    """

    def __init__(
        self,
        model: Callable[[], CostModel | None],
        minimum: int = LEAST_TOKENS,
        maximum: int | None = None,
        share: float = SHARE,
        default_gap_ns: int | None = None,
    ) -> None:
        assert minimum >= 1 and (maximum is None or maximum >= minimum)
        assert 0 < share <= 1
        assert default_gap_ns is None or default_gap_ns > 0
        self._model = model
        self.minimum = minimum
        self.maximum = maximum
        self.share = share
        self.default_gap_ns = default_gap_ns

    def tokens(self, decodes: Sequence[Request], prefills: Sequence[Request], now_ns: int) -> int | None:
        dues = [due for request in decodes if (due := self._due_ns(request)) is not None]
        if not dues:
            return self.maximum
        model = self._model()
        if model is None:
            return self.minimum
        alone = shape_with(decodes, prefills, 0)
        alone_ns = model.step_ns(alone)
        until_ns = alone_ns + int(self.share * (min(dues) - now_ns - alone_ns))
        most = sum(_rest(request) for request in prefills)
        if self.maximum is not None:
            most = min(most, self.maximum)
        fits, too_many = self.minimum, most + 1  # a step with more tokens takes no less time: halve the interval
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if model.step_ns(shape_with(decodes, prefills, middle)) <= until_ns:
                fits = middle
            else:
                too_many = middle
        return fits

    def _due_ns(self, request: Request) -> int | None:
        gap_ns = request.itl_max_limit_ns if request.streaming else None
        gap_ns = self.default_gap_ns if gap_ns is None else gap_ns
        return None if gap_ns is None else request.last_token_ns + gap_ns


def shape_with(decodes: Sequence[Request], prefills: Sequence[Request], prefill_tokens: int) -> StepShape:
    """The step that runs one token of each decode and this many prompt tokens, given out in order."""
    kv_read = sum(request.computed + 1 for request in decodes)
    pairs = 0
    left = prefill_tokens
    for request in prefills:
        if left <= 0:
            break
        piece = min(left, _rest(request))
        kv_read += request.computed + piece
        pairs += attended_pairs(request.computed, piece)
        left -= piece
    return StepShape(prefill_tokens - left, len(decodes), kv_read, pairs)


def _rest(request: Request) -> int:
    """Tokens to run before the next one is drawn: of the prompt, and after a preemption of the answer so far."""
    return request.tokens - request.computed
