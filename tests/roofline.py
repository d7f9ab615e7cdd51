"""The roofline of one step in plain Python, for tests to hold the question `step_work` and its properties against."""

from typing import NamedTuple

from reference_server.roofline import Ceilings
from reference_server.work import Work

NS_PER_S = 1e9


class Achieved(NamedTuple):
    """Least times by the ceilings, ns: of each kind of work alone, and in `least_ns` of the step."""

    flops_ns: float
    weight_ns: float
    kv_ns: float
    transfer_ns: float
    least_ns: float
    share: float  # least_ns / duration
    binds: str  # flops, weight, kv, transfer; empty for a step without work


def achieved(work: Work, duration_ns: int, ceilings: Ceilings) -> Achieved:
    """The roofline of a step (Williams, Waterman and Patterson 2009, doi:10.1145/1498765.1498785).

        least = max(flops / F, weight bytes / W + KV bytes / K) + transfer bytes / T

    Arithmetic runs while memory moves, so the longer of the two counts. Weights and KV come over the same memory, so
    their times add. Transfers do not hide: the inputs are there before the first kernel, the tokens leave after the
    last. Parts that depend on each other (the layers one after another, attention after its projection) are not added
    up, though most engines run them in turn: other sequences of the batch could fill the gap, and a bound that some
    engine can beat is none.

    What binds is the largest part of `least`: `flops` where arithmetic is the longer, else `weight` or `kv`, whichever
    takes more; `transfer` where it outweighs both. A share above 1 means that the ceiling does not hold for this step,
    as for weights that fit into the caches.
    """
    assert duration_ns > 0
    flops_ns = work.flops * NS_PER_S / ceilings.flops_per_s
    weight_ns = work.weight_bytes * NS_PER_S / ceilings.weight_bytes_per_s
    kv_ns = (work.kv_read_bytes + work.kv_write_bytes) * NS_PER_S / ceilings.kv_bytes_per_s
    transfer_ns = work.transfer_bytes * NS_PER_S / ceilings.transfer_bytes_per_s
    inside_ns = max(flops_ns, weight_ns + kv_ns)
    least_ns = inside_ns + transfer_ns
    if least_ns == 0:
        binds = ""
    elif transfer_ns > inside_ns:
        binds = "transfer"
    elif flops_ns >= weight_ns + kv_ns:
        binds = "flops"
    else:
        binds = "weight" if weight_ns >= kv_ns else "kv"
    return Achieved(flops_ns, weight_ns, kv_ns, transfer_ns, least_ns, least_ns / duration_ns, binds)
