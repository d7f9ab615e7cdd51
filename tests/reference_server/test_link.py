import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_server.link import EngineLink, FrameBuffer, LinkClosedError, encode


@given(
    st.lists(st.dictionaries(st.text(max_size=5), st.integers(-(2**53), 2**53), max_size=3), max_size=8),
    st.lists(st.integers(1, 40), min_size=1, max_size=20),
)
def test_messages_survive_any_cut(messages: list[dict[str, int]], cuts: list[int]) -> None:
    data = b"".join(encode(message) for message in messages)
    buffer, received, at, i = FrameBuffer(), [], 0, 0
    while at < len(data):
        size = cuts[i % len(cuts)]
        received += buffer.feed(data[at : at + size])
        at, i = at + size, i + 1
    assert received == messages


def test_the_engine_never_waits_for_a_front_end_that_does_not_read() -> None:
    ours, theirs = socket.socketpair()
    link = EngineLink(ours)
    sent = [{"op": "tokens", "n": i, "filler": "x" * 1000} for i in range(2000)]  # 2 MB, beyond any socket buffer
    for message in sent:
        link.send(message)
    buffer, received = FrameBuffer(), []
    theirs.settimeout(5)
    while len(received) < len(sent):
        link.flush()
        received += buffer.feed(theirs.recv(1 << 16))
    assert received == sent
    ours.close()
    theirs.close()


def test_the_end_of_the_other_process_is_noticed() -> None:
    ours, theirs = socket.socketpair()
    link = EngineLink(ours)
    assert link.receive(0) == []
    theirs.close()
    with pytest.raises(LinkClosedError):
        link.receive(5)
    ours.close()
