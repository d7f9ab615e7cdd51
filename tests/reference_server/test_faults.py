import pytest

from reference_server.faults import Fault, parse_fault
from sloscope.errors import ConfigError


def test_faults_are_written_as_documented() -> None:
    assert parse_fault("stall=200ms@10") == Fault(stall_ns=200_000_000, stall_at=10)
    assert parse_fault("slow=5ms") == Fault(slow_ns=5_000_000)
    assert parse_fault("error@12") == Fault(error_after=12)
    assert parse_fault("slow=1ms, error@3") == Fault(slow_ns=1_000_000, error_after=3)


@pytest.mark.parametrize(
    "text", ["", "stall", "stall=200ms", "stall=@3", "stall=200ms@0", "stall=1ms@x", "slow=", "slow=5", "error",
             "error@", "error@-1", "error@²", "error@" + "9" * 5000, "error=3", "slow=61s", "explode"],
)  # fmt: skip
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="x-sloscope-fault"):
        parse_fault(text)


def test_a_stall_falls_into_one_step_and_slowness_into_every_decode_step() -> None:
    fault = parse_fault("stall=200ms@3,slow=5ms")
    # Token 1 comes out of prefill; token 3 stalls on top of being slow: 200 + 5.
    assert [fault.delay_ns(token)[0] // 1_000_000 for token in (1, 2, 3, 4)] == [0, 5, 205, 5]
    assert fault.delay_ns(3)[1] == "stall=200ms@3,slow=5ms"
