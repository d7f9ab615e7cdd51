"""Faults that a request may ask for. They happen inside engine steps, and only where the server allows them.

stall=200ms@10   the step that makes this request's 10th token takes 200 ms more: the whole batch stalls
slow=5ms         every step that decodes this request takes 5 ms more
error@12         an error in the stream after 12 tokens
"""

from dataclasses import dataclass

from sloscope.errors import ConfigError
from sloscope.units import NS_PER_S, format_ns, parse_duration_ns

MAX_DELAY_NS = 60 * NS_PER_S
_ACCEPTED = "accepted: stall=DURATION@TOKEN, slow=DURATION, error@TOKEN, at most 60s, joined by commas"


@dataclass(frozen=True, slots=True)
class Fault:
    stall_ns: int = 0
    stall_at: int = 0  # token number, from 1
    slow_ns: int = 0
    error_after: int = 0  # tokens; 0: never

    def delay_ns(self, token: int) -> tuple[int, str]:
        """What the step that makes this request's token number `token` takes more, and its name for the journal."""
        delay, names = 0, []
        if self.stall_ns and token == self.stall_at:
            delay += self.stall_ns
            names.append(f"stall={format_ns(self.stall_ns)}@{token}")
        if self.slow_ns and token > 1:  # the first token comes out of prefill
            delay += self.slow_ns
            names.append(f"slow={format_ns(self.slow_ns)}")
        return delay, ",".join(names)


def parse_fault(text: str, field: str = "x-sloscope-fault") -> Fault:
    """Raises ConfigError for anything that is not accepted."""
    stall_ns = stall_at = slow_ns = error_after = 0
    for item in text.split(","):
        name, _, value = item.strip().partition("=")
        if name == "stall" and "@" in value:
            duration, _, at = value.partition("@")
            stall_ns, stall_at = _delay(duration, field), _token(at, text, field)
        elif name == "slow" and value:
            slow_ns = _delay(value, field)
        elif name.startswith("error@") and not value:
            error_after = _token(name.removeprefix("error@"), text, field)
        else:
            raise ConfigError(f"{field}: {text[:60]!r} is not accepted; {_ACCEPTED}")
    return Fault(stall_ns, stall_at, slow_ns, error_after)


def _delay(text: str, field: str) -> int:
    ns = parse_duration_ns(text, field)
    if ns > MAX_DELAY_NS:
        raise ConfigError(f"{field}: {text!r} is too long; {_ACCEPTED}")
    return ns


def _token(at: str, text: str, field: str) -> int:
    # Python refuses to read numbers of thousands of digits.
    if not at.isascii() or not at.isdigit() or len(at) >= 20 or not 1 <= int(at) <= 1_000_000:
        raise ConfigError(f"{field}: {text[:60]!r}: token {at[:20]!r} is not a number from 1; {_ACCEPTED}")
    return int(at)
