"""Heads of HTTP/1.1 messages to structures and back. No I/O.

Heads are parsed by llhttp and written anew from what was understood, so that
both neighbours understand the same.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import NamedTuple

import httptools

from exporter.framing import Body, Chunked, MessageError, NoBody, Sized, UntilClose

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 200
MAX_TARGET_BYTES = 16 << 10

# llhttp takes several blanks, and versions of RTSP and ICE, too.
_REQUEST_LINE = re.compile(rb"[^ ]+ [^ #]+ HTTP/[0-9]\.[0-9]")
_ABSOLUTE = re.compile(rb"https?://[^/?@]+([/?].*)?", re.IGNORECASE)
_BROKEN_LINE = re.compile(rb"(?<!\r)\n|\r(?!\n|\Z)|\0")
_DIGITS = re.compile(rb"[0-9]{1,18}")
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"upgrade", b"http2-settings", b"transfer-encoding"}
)

Headers = list[tuple[bytes, bytes]]


class RequestHead(NamedTuple):
    method: bytes
    target: bytes  # origin form: path and query
    version: str
    headers: Headers  # as sent, in order
    body: Body
    keep_alive: bool
    expects_continue: bool

    @property
    def path(self) -> bytes:
        return self.target.partition(b"?")[0]

    def lowered(self) -> dict[str, str]:
        """Names in lower case; of a repeated header the first."""
        found: dict[str, str] = {}
        for name, value in self.headers:
            found.setdefault(name.lower().decode("latin-1"), value.decode("latin-1"))
        return found


class ResponseHead(NamedTuple):
    status: int
    reason: bytes
    version: str
    headers: Headers
    body: Body
    keep_alive: bool

    def get(self, name: bytes) -> str:
        return next(iter(self.get_all(name)), "")

    def get_all(self, name: bytes) -> list[str]:
        return [value.decode("latin-1") for key, value in self.headers if key.lower() == name]


class _Collector:
    def __init__(self) -> None:
        self.headers: Headers = []
        self.target = b""
        self.reason = b""
        self.complete = False

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_status(self, reason: bytes) -> None:
        self.reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        self.complete = True


def is_broken(head: bytes, searched: int = 0) -> bool:
    """Whether a head that is still incomplete has a line end other than CRLF already: its end would never come."""
    return _BROKEN_LINE.search(head, max(0, searched - 1)) is not None


def is_no_answer(head: bytes, searched: int = 0) -> bool:
    """The same of a response head, whose first bytes are known, too."""
    return is_broken(head, searched) or not head.startswith(b"HTTP/1."[: len(head)])


def find_head_end(buffer: bytes, searched: int = 0) -> int:
    """Index after the blank line, 0 while there is none. `searched` bytes were looked at before."""
    at = buffer.find(b"\r\n\r\n", max(0, searched - 3))
    return at + 4 if at >= 0 else 0


def _only_crlf(head: bytes) -> bool:
    # A bare CR or LF is a line end to some and not to others, which is how requests are smuggled.
    lines = head.count(b"\r\n")
    return head.count(b"\n") == lines and head.count(b"\r") == lines and b"\0" not in head


def parse_request_head(head: bytes) -> RequestHead:
    """`head` ends with its blank line. Raises MessageError with the status for the client."""
    if not _only_crlf(head):
        raise MessageError(400, "request head: line ends other than CRLF")
    if head.find(b"\r\n") > MAX_TARGET_BYTES:
        raise MessageError(414, "request line: longer than 16 KiB")
    collector = _Collector()
    parser = httptools.HttpRequestParser(collector)
    try:
        parser.feed_data(head)
    except httptools.HttpParserUpgrade:
        pass
    except httptools.HttpParserInvalidMethodError:
        raise MessageError(501, "method: is not implemented") from None
    except httptools.HttpParserError as error:
        raise MessageError(400, f"request head: {error}") from None
    if not collector.complete:
        raise MessageError(400, "request head: is incomplete")
    method, version, headers = parser.get_method(), parser.get_http_version(), collector.headers
    if version not in ("1.0", "1.1"):
        raise MessageError(505, f"HTTP version {version}: accepted: 1.0 and 1.1")
    if _REQUEST_LINE.fullmatch(head, 0, head.find(b"\r\n")) is None:
        raise MessageError(400, "request line: accepted: METHOD PATH HTTP/1.1")
    if method == b"CONNECT":
        raise MessageError(501, "CONNECT: is refused")
    if len(headers) > MAX_HEADERS:
        raise MessageError(431, f"headers: {len(headers)}; accepted: at most {MAX_HEADERS}")
    values = _values(headers)
    if version == "1.1" and len(values.get(b"host", ())) != 1:
        raise MessageError(400, "host: HTTP/1.1 needs exactly one")
    if any(b"websocket" in value.lower() for value in values.get(b"upgrade", ())):
        raise MessageError(501, "upgrade: is refused")
    expects = [value.lower() for value in values.get(b"expect", ())]
    if any(value != b"100-continue" for value in expects):
        raise MessageError(417, "expect: accepted: 100-continue")
    connection = _tokens(values.get(b"connection", ()))
    return RequestHead(
        method,
        _origin_form(collector.target, method),
        version,
        headers,
        _request_body(values, version),
        keep_alive=version == "1.1" and b"close" not in connection,
        expects_continue=bool(expects) and version == "1.1",
    )


def parse_response_head(head: bytes, method: bytes) -> ResponseHead:
    """`head` ends with its blank line. Raises MessageError(502)."""
    if not _only_crlf(head):
        raise MessageError(502, "response head: line ends other than CRLF")
    if len(head) > MAX_HEAD_BYTES:
        raise MessageError(502, "response head: longer than 64 KiB")
    collector = _Collector()
    parser = httptools.HttpResponseParser(collector)
    try:
        parser.feed_data(head)
    except httptools.HttpParserUpgrade:
        pass
    except httptools.HttpParserError as error:
        raise MessageError(502, f"response head: {error}") from None
    if not collector.complete:
        raise MessageError(502, "response head: is incomplete")
    version = parser.get_http_version()
    if version not in ("1.0", "1.1") or not head.startswith(b"HTTP/"):
        raise MessageError(502, "response head: accepted: HTTP/1.0 and HTTP/1.1")
    status, headers = parser.get_status_code(), collector.headers
    if status < 100:
        raise MessageError(502, f"response head: status {status:03d}")
    values = _values(headers)
    body = _response_body(values, status, method)
    connection = _tokens(values.get(b"connection", ()))
    keep_alive = b"close" not in connection and (version == "1.1" or b"keep-alive" in connection)
    return ResponseHead(
        status, collector.reason, version, headers, body, keep_alive and not isinstance(body, UntilClose)
    )


def _values(headers: Headers) -> dict[bytes, list[bytes]]:
    values: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        values.setdefault(name.lower(), []).append(value)
    return values


def _tokens(values: list[bytes] | tuple[()]) -> set[bytes]:
    return {token.strip().lower() for value in values for token in value.split(b",")}


def _origin_form(target: bytes, method: bytes) -> bytes:
    if target.startswith(b"/") or (target == b"*" and method == b"OPTIONS"):
        return target
    match = _ABSOLUTE.fullmatch(target)
    if match is None:
        raise MessageError(400, "request target: accepted: a path")
    path = match[1] or b"/"
    return path if path.startswith(b"/") else b"/" + path


# The parser refuses some of what is checked here and for responses. The checks stay, should another release of it be
# more lenient: who reads a length otherwise than the next hop lets requests be smuggled.
def _request_body(values: dict[bytes, list[bytes]], version: str) -> Body:
    lengths, codings = values.get(b"content-length"), values.get(b"transfer-encoding")
    if codings:
        if lengths:
            raise MessageError(400, "content-length: not beside transfer-encoding")
        if version == "1.0":
            raise MessageError(400, "transfer-encoding: not in HTTP/1.0")
        if [coding.lower() for coding in codings] != [b"chunked"]:
            raise MessageError(501, "transfer-encoding: accepted: chunked")
        return Chunked()
    if not lengths:
        return NoBody()
    if len(lengths) > 1:
        raise MessageError(400, "content-length: is repeated")
    return _sized(lengths[0], 400)


def _sized(value: bytes, status: int) -> Sized:
    if _DIGITS.fullmatch(value) is None:
        raise MessageError(status, "content-length: is not a whole number")
    return Sized(int(value))


def _response_body(values: dict[bytes, list[bytes]], status: int, method: bytes) -> Body:
    if method == b"HEAD" or status < 200 or status in (204, 304):
        return NoBody()
    lengths, codings = values.get(b"content-length"), values.get(b"transfer-encoding")
    if codings:
        if lengths or [coding.lower() for coding in codings] != [b"chunked"]:
            raise MessageError(502, "transfer-encoding of the response: accepted: chunked, without content-length")
        return Chunked(padded=True)
    if not lengths:
        return UntilClose()
    if len(set(lengths)) > 1:
        raise MessageError(502, "content-length of the response: contradicts itself")
    return _sized(lengths[0], 502)


def _end_to_end(headers: Headers, dropped: frozenset[bytes]) -> Headers:
    """Without what concerns one hop only, the names listed in Connection included."""
    named = _tokens([value for name, value in headers if name.lower() == b"connection"])
    drop = _HOP_BY_HOP | dropped | named - {b"content-length", b"host", b"content-type"}
    return [(name, value) for name, value in headers if name.lower() not in drop]


def _encode(first: bytes, headers: Headers) -> bytes:
    lines = [first, *(b"%b: %b" % pair for pair in headers), b"", b""]
    return b"\r\n".join(lines)


def encode_request(head: RequestHead, prefix: bytes, authority: bytes, extra: Headers) -> bytes:
    """The head for the upstream: `extra` replaces headers of the same name."""
    dropped = frozenset({b"host", b"expect", *(name.lower() for name, _ in extra)})
    headers = [(b"host", authority), *_end_to_end(head.headers, dropped), *extra]
    if isinstance(head.body, Chunked):
        headers.append((b"transfer-encoding", b"chunked"))
    return _encode(b"%b %b HTTP/1.1" % (head.method, prefix + head.target), headers)


def encode_response(head: ResponseHead, extra: Headers, chunked: bool, close: bool) -> bytes:
    dropped = {name.lower() for name, _ in extra}
    if head.status < 200 or head.status == 204:
        dropped.add(b"content-length")  # there is no body, and a reader that believes the number would wait for one
    headers = [*_end_to_end(head.headers, frozenset(dropped)), *extra]
    if extra and head.get(b"access-control-allow-origin"):
        # A page of another origin that may read the answer could not read our names otherwise. Lists of several headers
        # add up.
        headers.append((b"access-control-expose-headers", b", ".join(name for name, _ in extra)))
    if chunked:
        headers.append((b"transfer-encoding", b"chunked"))
    if close:
        headers.append((b"connection", b"close"))
    return _encode(b"HTTP/1.1 %d %b" % (head.status, head.reason), headers)


def encode_error(status: int, text: str, extra: Headers, with_body: bool = True) -> bytes:
    """A whole response in the error shape of the API that is observed; the connection ends with it."""
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    body = b'{"error":{"message":"%b","type":"sloscope_sidecar","code":%d}}' % (quoted.encode(), status)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        *extra,
        (b"connection", b"close"),
    ]
    try:
        phrase = HTTPStatus(status).phrase.encode()
    except ValueError:
        phrase = b"Error"
    return _encode(b"HTTP/1.1 %d %b" % (status, phrase), headers) + (body if with_body else b"")
