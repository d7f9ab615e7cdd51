"""The way of nearly every event: one read that is one chunk of a stream, which goes on as it came.

Little happens here, since it happens between two system calls, where the processor has forgotten the interpreter: what
takes a microsecond in a loop takes several. The rest is done for many events at once, by Observation.understand.
"""

from __future__ import annotations

from collections.abc import Callable

from exporter.framing import MAX_SHORT_LINE, SHORT_CHUNKS, Chunked
from exporter.observation import MAX_READS, Observation

Receive = Callable[[bytes, int], None]


def relay(
    body: Chunked,
    write: Callable[[bytes], None],
    observation: Observation,
    monotonic_ns: Callable[[], int],
    otherwise: Receive,
) -> Callable[[bytes], None]:
    """Takes reads of a response's body that is under way. `otherwise` gets, with their stamps, those that are not one
    short chunk of a size that was met before, and those that find many waiting to be understood.
    """
    follows, reads, note = SHORT_CHUNKS.get, observation.reads, observation.reads.append

    def receive(data: bytes) -> None:
        received_ns = monotonic_ns()  # the receipt: before anything is parsed
        start, size = data.find(b"\n", 0, MAX_SHORT_LINE) + 1, len(data)
        is_chunk = follows(data[:start]) == size - start and data.endswith(b"\r\n") and body.is_between
        if not is_chunk or len(reads) >= MAX_READS:
            otherwise(data, received_ns)
            return
        # Before the write: on another core the client can have the bytes before the call returns.
        forwarded_ns = monotonic_ns()
        write(data)
        note((data, start, size - 2, received_ns, forwarded_ns, monotonic_ns()))

    return receive
