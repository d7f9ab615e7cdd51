"""The way of nearly every event: one read that is one chunk of a stream, which goes on as it came.

Little happens here, since it happens between two system calls, where the processor has forgotten the interpreter: what
takes a microsecond in a loop takes several. The rest is done for many events at once, by Observation.understand.
"""

from __future__ import annotations

from collections.abc import Callable

from exporter.framing import Chunked
from exporter.observation import Observation

Receive = Callable[[bytes, int], None]


def relay(
    body: Chunked,
    write: Callable[[bytes], None],
    observation: Observation,
    monotonic_ns: Callable[[], int],
    otherwise: Receive,
) -> Receive:
    """Takes reads of a body that is under way, each with its stamp. `otherwise` gets those that are not one short
    chunk.
    """
    whole_chunk, note = body.whole_chunk, observation.reads.append

    def receive(data: bytes, received_ns: int) -> None:
        start = whole_chunk(data)
        if not start:
            otherwise(data, received_ns)
            return
        # Before the write: on another core the client can have the bytes before the call returns.
        forwarded_ns = monotonic_ns()
        write(data)
        note((data, start, len(data) - 2, received_ns, forwarded_ns, monotonic_ns() - received_ns))

    return receive
