"""What the supervisor validated, and how a child process gets it."""

from __future__ import annotations

import ssl
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from sloscope import contract as contracts
from sloscope.errors import ConfigError
from sloscope.units import NS_PER_S

_WEB_PORTS = {"http": 80, "https": 443}
BALANCES = ("tokens", "requests")
HOPS = ("gateway", "router", "sidecar")  # of the record's roles those between a client and a server
OBSERVED = (b"/chat/completions", b"/v1/completions")  # several providers have the first under /v4, or under no version


@dataclass(frozen=True, slots=True)
class Upstream:
    url: str  # as given, without a trailing slash: the label of its series
    host: str
    port: int
    tls: bool
    prefix: bytes  # path before every request's own path
    authority: bytes  # the Host header


def parse_upstream(text: str, option: str = "--upstream") -> Upstream:
    accepted = "accepted: http://HOST[:PORT][/PATH] or https://…"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ConfigError(f"{option}: {text!r} is not a URL; {accepted}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{option}: {text!r} is not accepted; {accepted}")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(f"{option}: must not carry credentials, a query or a fragment; {accepted}")
    if port == 0 or not text.isascii() or any(c.isspace() for c in text):
        raise ConfigError(f"{option}: {text!r} is not accepted; {accepted}")
    tls = parts.scheme == "https"
    path = parts.path.rstrip("/")
    return Upstream(
        url=f"{parts.scheme}://{parts.netloc}{path}",
        host=parts.hostname,
        port=port or (443 if tls else 80),
        tls=tls,
        prefix=path.encode(),
        authority=parts.netloc.encode(),
    )


def parse_engine_metrics(text: str) -> tuple[str, str]:
    """(label, URL) of an engine's own metrics. The label is HOST:PORT, with the path where it is not /metrics."""
    found = parse_upstream(text, "--engine-metrics")
    path = found.prefix.decode() or "/metrics"
    host = f"[{found.host}]" if ":" in found.host else found.host
    label = f"{host}:{found.port}" + ("" if path == "/metrics" else path)
    return label, found.url.removesuffix(found.prefix.decode()) + path


def parse_cors_origin(text: str) -> str:
    """As a browser spells it in its Origin header: scheme and host in lower case, no port that the scheme implies."""
    accepted = "accepted: http://HOST[:PORT] or https://…, without a path"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ConfigError(f"--cors-origin: {text!r} is no origin; {accepted}") from None
    rest = (parts.path, parts.query, parts.fragment, parts.username, parts.password)
    is_word = text.isascii() and not any(c.isspace() for c in text)
    if parts.scheme not in _WEB_PORTS or not parts.hostname or any(rest) or not is_word or port == 0:
        raise ConfigError(f"--cors-origin: {text!r} is not accepted; {accepted}")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}" + (f":{port}" if port not in (None, _WEB_PORTS[parts.scheme]) else "")


def tls_context(ca_file: str = "") -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca_file or None)
    context.set_alpn_protocols(["http/1.1"])
    return context


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that both children need; `Settings(**json)` on their side."""

    upstreams: tuple[str, ...]
    contract: str  # TOML text or shorthand
    contract_is_shorthand: bool
    events: str
    role: str
    tenant_header: str
    inspect_limit: int  # bytes of a request body that are looked at
    drain_ns: int
    max_label_values: int
    ca_file: str
    socket_path: str  # where the data plane hands its metrics to the control plane
    sql_every_ns: int  # 0: off
    sql_window_ns: int = 3600 * NS_PER_S  # what they are computed over, up to now; 0: everything
    token: str = ""
    cors_origins: tuple[str, ...] = ()  # web pages that may post receipts
    receipts_rate: int = 1000  # receipts a second that one address may report …
    receipts_burst: int = 20_000  # … after so many: what a replay keeps while the control plane does not answer
    receipts_max_bytes: int = 4 << 20  # of one report
    engine_metrics: tuple[str, ...] = ()  # URLs as given, each with a label of its own
    engine_metrics_every_ns: int = 5_000_000_000
    balance: str = "tokens"
    hedge_after: str = ""  # empty: off
    hedge_max_share: float = 0.05
    ask_usage: bool = False

    def load_contract(self) -> contracts.Contract:
        read = contracts.from_shorthand if self.contract_is_shorthand else contracts.parse
        return read(self.contract)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Settings:
        lists = {name: tuple(body[name]) for name in ("upstreams", "cors_origins", "engine_metrics")}
        return cls(**{**body, **lists})


def check_role(role: str) -> str:
    if role not in HOPS:
        raise ConfigError(f"--role: {role!r} is not accepted; accepted: {', '.join(HOPS)}")
    return role


def check_balance(balance: str) -> str:
    if balance not in BALANCES:
        raise ConfigError(f"--balance: {balance!r} is not accepted; accepted: {', '.join(BALANCES)}")
    return balance


def is_observed(path: bytes) -> bool:
    """Whether requests of this path are judged: an OpenAI-compatible completion API under any prefix."""
    return path.endswith(OBSERVED)
