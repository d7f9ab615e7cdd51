"""HTTP/1.0, which proxies still speak to their upstreams: no chunks, the body ends with the connection."""

import json
import socket
from collections.abc import Iterator

import pytest

from tests.reference_server.serving import Served


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("http10"))
    yield served
    assert served.stop() == 0


def exchange(served: Served, request: bytes) -> tuple[bytes, bytes]:
    """Head and body of the answer, read until the server closes."""
    host, _, port = served.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(request)
        data = b""
        while block := connection.recv(65536):
            data += block
    head, _, body = data.partition(b"\r\n\r\n")
    return head.lower(), body


def test_a_stream_has_no_chunk_framing_and_ends_with_the_connection(served: Served) -> None:
    body = json.dumps({"model": "builtin", "prompt": "go", "max_tokens": 3, "stream": True}).encode()
    head, answer = exchange(
        served,
        b"POST /v1/completions HTTP/1.0\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
        % (len(body), body),
    )
    assert b"transfer-encoding" not in head and b"connection: close" in head
    lines = [line for line in answer.split(b"\n") if line.strip()]
    assert all(line.startswith(b"data: ") for line in lines) and lines[-1] == b"data: [DONE]"


def test_an_answer_of_known_length_says_it(served: Served) -> None:
    head, answer = exchange(served, b"GET /v1/models HTTP/1.0\r\nhost: x\r\n\r\n")
    assert b"content-length: %d" % len(answer) in head
    assert json.loads(answer)["data"][0]["owned_by"] == "sloscope"
