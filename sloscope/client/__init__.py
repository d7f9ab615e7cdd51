"""What runs in the consumer's own process: receipt-stamping transports for httpx, and the open-loop replay.

from openai import OpenAI
import httpx
from sloscope.client import ReceiptTransport

client = OpenAI(http_client=httpx.Client(transport=ReceiptTransport("events", contract="contract.toml")))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sloscope.client.transport import AsyncReceiptTransport, ReceiptTransport, stop_reason

__all__ = ["AsyncReceiptTransport", "ReceiptTransport", "stop_reason"]


def __getattr__(name: str) -> Any:
    # httpx is imported by who asks for a transport; the replay does without.
    if name in __all__:
        return getattr(importlib.import_module("sloscope.client.transport"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
