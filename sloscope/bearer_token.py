"""The bearer token of a control plane, from a file or from the environment."""

import os
from pathlib import Path

from sloscope.errors import ConfigError

VARIABLE = "SLOSCOPE_TOKEN"


def read(path: str) -> str:
    """The token in the file, else the variable's; "" for none. No message repeats it."""
    try:
        token = (Path(path).read_text(encoding="utf-8") if path else os.environ.get(VARIABLE, "")).strip()
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"--token-file: {path!r} cannot be read; accepted: a text file with the token") from None
    if path and not token:
        raise ConfigError(f"--token-file: {path!r} is empty; accepted: a text file with the token")
    return checked(token, "--token-file" if path else VARIABLE)


def checked(token: str, field: str) -> str:
    """The token, which becomes a header value: nothing in it may end the line."""
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(f"{field}: accepted: one line of printable ASCII")
    return token
