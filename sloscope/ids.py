"""Request ids: 26-character ULIDs (48 bits of wall milliseconds, 80 random bits, Crockford base 32)."""

import os
import re
import time

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_ULID = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}")


def new_request_id(wall_ns: int | None = None, randomness: bytes | None = None) -> str:
    """A fresh id. Ten random bytes are taken from the system unless given."""
    milliseconds = (time.time_ns() if wall_ns is None else wall_ns) // 1_000_000
    random_bytes = os.urandom(10) if randomness is None else randomness
    value = (milliseconds & ((1 << 48) - 1)) << 80 | int.from_bytes(random_bytes, "big")
    return "".join(_ALPHABET[value >> shift & 31] for shift in range(125, -1, -5))


def is_request_id(text: str) -> bool:
    return _ULID.fullmatch(text) is not None
