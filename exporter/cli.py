"""`sloscope sidecar`: everything is validated before anything starts."""

from __future__ import annotations

import ipaddress
import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from exporter.hedging import parse_hedge_after
from exporter.settings import (
    Settings,
    check_balance,
    check_role,
    parse_cors_origin,
    parse_engine_metrics,
    parse_upstream,
    tls_context,
)
from sloscope import bearer_token
from sloscope import contract as contracts
from sloscope.client import contract_file
from sloscope.errors import ConfigError, ContractError
from sloscope.output import message
from sloscope.units import parse_address, parse_duration_ns

app = typer.Typer(add_completion=False, no_args_is_help=False)
_FASTEST_POLL_NS = 100_000_000


@app.command()
def sidecar(
    upstream: Annotated[
        list[str], typer.Option(help="URL of an OpenAI-compatible server; repeat it for several, least busy first.")
    ],
    listen: Annotated[str, typer.Option(help="HOST:PORT for requests; without a host 127.0.0.1.")] = "127.0.0.1:8001",
    control: Annotated[str, typer.Option(help="HOST:PORT for metrics, receipts and questions.")] = "127.0.0.1:9464",
    contract: Annotated[str, typer.Option(help="SLO contract, a TOML file.")] = "",
    goodput: Annotated[str, typer.Option(help="Contract in short, milliseconds: 'ttft:300 itl_max:30'.")] = "",
    events: Annotated[Path, typer.Option(help="Directory of the raw record.")] = Path("events"),
    engine_events: Annotated[
        str,
        typer.Option(
            help="Events directory of the engines on this host, where it is another one: their records join ours."
        ),
    ] = "",
    role: Annotated[str, typer.Option(help="This hop's place: gateway, router or sidecar.")] = "sidecar",
    tenant_header: Annotated[str, typer.Option(help="Request header that names the tenant.")] = "x-slo-tenant",
    max_label_values: Annotated[
        int, typer.Option(min=1, max=1000, help="Values per label of a metric; the rest is `other`.")
    ] = 50,
    inspect_limit: Annotated[
        int, typer.Option(min=1024, help="Bytes of a request body that are looked at; larger ones pass unread.")
    ] = 8 << 20,
    balance: Annotated[
        str, typer.Option(help="What makes an upstream the least busy: outstanding tokens or requests.")
    ] = "tokens",
    hedge_after: Annotated[
        str,
        typer.Option(
            help="Ask a second upstream when no output event came in this time: a quantile of recent ones, p50 to p99,"
            " or a duration. Default: never."
        ),
    ] = "",
    hedge_max_share: Annotated[
        float,
        typer.Option(help="Second requests, at most, as a share of those that could be hedged; above 0, at most 1."),
    ] = 0.05,
    ask_usage: Annotated[
        bool, typer.Option("--ask-usage", help="Ask upstreams for the usage of streams whose client did not.")
    ] = False,
    drain: Annotated[str, typer.Option(help="How long open streams may go on after SIGTERM.")] = "10s",
    sql_every: Annotated[str, typer.Option(help="How often sloscope_sql_ series are computed; off: never.")] = "30s",
    sql_window: Annotated[
        str, typer.Option(help="What they are computed over: so long up to now; 0: everything that was recorded.")
    ] = "1h",
    engine_metrics: Annotated[
        list[str] | None,
        typer.Option(help="URL of an engine's own /metrics, to be shown beside ours; repeat it for several."),
    ] = None,
    engine_metrics_every: Annotated[str, typer.Option(help="How often those are asked for.")] = "5s",
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin of web pages that may post receipts, as http://HOST:PORT; repeat it for several."),
    ] = None,
    receipts_rate: Annotated[int, typer.Option(help="Receipts a second that one address may report.")] = 1000,
    receipts_burst: Annotated[
        int, typer.Option(help="Receipts that one address may report at once before the rate holds.")
    ] = 20_000,
    receipts_max_bytes: Annotated[int, typer.Option(help="Bytes of one report of receipts, at most.")] = 4 << 20,
    ca_file: Annotated[str, typer.Option(help="Certificates to trust for https upstreams, PEM.")] = "",
    token_file: Annotated[
        str, typer.Option(help=f"File with the bearer token of the control address; or set {bearer_token.VARIABLE}.")
    ] = "",
) -> None:
    """Run the sidecar: forward, stamp, record, expose."""
    from exporter.supervisor import bind, socket_directory, supervise

    if not upstream:
        raise ConfigError("--upstream: '' is not accepted; accepted: at least one URL")
    _check_upstreams(upstream)
    text, is_shorthand = _contract_text(contract, goodput)
    token = bearer_token.read(token_file)
    listen_at, control_at = parse_address(listen, "--listen"), parse_address(control, "--control")
    if not token and not _is_loopback(control_at[0]):
        raise ConfigError(
            f"--control: {control!r} is not a loopback address; accepted with a token only: --token-file or"
            f" {bearer_token.VARIABLE}"
        )
    _check_ca_file(ca_file)
    drain_ns = parse_duration_ns(drain, "--drain")
    sql_every_ns = _duration_or("off", sql_every, "--sql-every")
    sql_window_ns = _duration_or("0", sql_window, "--sql-window")
    engines, engines_every_ns = _engine_metrics(engine_metrics or [], engine_metrics_every)
    if not tenant_header or any(not (c.isalnum() or c in "-_") for c in tenant_header):
        raise ConfigError(f"--tenant-header: {tenant_header!r} is not accepted; accepted: a header name")
    check_role(role)
    check_balance(balance)
    _check_hedging(hedge_after, hedge_max_share, len(upstream))
    _check_whole("--receipts-rate", receipts_rate, 1, 1_000_000)
    _check_whole("--receipts-burst", receipts_burst, 1, 10_000_000)
    _check_whole("--receipts-max-bytes", receipts_max_bytes, 1024, 1 << 30)
    cors_origins = tuple(parse_cors_origin(origin) for origin in cors_origin or [])
    with bind(*listen_at, "--listen") as listener, bind(*control_at, "--control") as control_listener:
        _check_events(events)
        if engine_events:
            link_engines(events, Path(engine_events))
        _keep_contract(text, is_shorthand, Path(contract) if contract else None, events)
        with socket_directory() as directory:
            settings = Settings(
                upstreams=tuple(parse_upstream(url).url for url in upstream),
                contract=text,
                contract_is_shorthand=is_shorthand,
                events=str(events.resolve()),
                role=role,
                tenant_header=tenant_header.lower(),
                inspect_limit=inspect_limit,
                drain_ns=drain_ns,
                max_label_values=max_label_values,
                ca_file=ca_file,
                socket_path=f"{directory}/metrics.sock",
                sql_every_ns=sql_every_ns,
                sql_window_ns=sql_window_ns,
                token=token,
                cors_origins=cors_origins,
                receipts_rate=receipts_rate,
                receipts_burst=receipts_burst,
                receipts_max_bytes=receipts_max_bytes,
                engine_metrics=engines,
                engine_metrics_every_ns=engines_every_ns,
                balance=balance,
                hedge_after=hedge_after,
                hedge_max_share=hedge_max_share,
                ask_usage=ask_usage,
            )
            raise typer.Exit(supervise(settings, listener, control_listener))


def _check_hedging(after: str, max_share: float, upstreams: int) -> None:
    if not 0 < max_share <= 1:
        raise ConfigError(f"--hedge-max-share: {max_share:g} is not accepted; accepted: above 0, at most 1")
    if after:
        parse_hedge_after(after)
        if upstreams < 2:
            raise ConfigError(f"--hedge-after: {after!r} needs a second --upstream to ask")


def _check_upstreams(given: list[str]) -> None:
    known: set[str] = set()
    for text in given:
        url = parse_upstream(text).url
        if url in known:
            raise ConfigError(f"--upstream: {text!r} is given twice; accepted: each upstream once")
        known.add(url)


def _duration_or(word: str, text: str, option: str) -> int:
    """0 for this word."""
    if text == word:
        return 0
    try:
        return parse_duration_ns(text, option)
    except ConfigError as error:
        raise ConfigError(f"{error}; or {word}") from None


def _check_whole(option: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{option}: {value} is not accepted; accepted: {least} to {most}")


def _engine_metrics(urls: list[str], every: str) -> tuple[tuple[str, ...], int]:
    labels: dict[str, str] = {}
    for url in urls:
        label, _ = parse_engine_metrics(url)
        if label in labels:
            raise ConfigError(f"--engine-metrics: {url!r} is the same as {labels[label]!r}; accepted: each engine once")
        labels[label] = url
    every_ns = parse_duration_ns(every, "--engine-metrics-every")
    if every_ns < _FASTEST_POLL_NS:
        raise ConfigError(f"--engine-metrics-every: {every!r} is not accepted; accepted: at least 100ms")
    return tuple(urls), every_ns


def _contract_text(path: str, shorthand: str) -> tuple[str, bool]:
    """The contract as text, checked: the children need not be able to read the file."""
    if bool(path) == bool(shorthand):
        raise ConfigError("--contract: accepted: either a file or --goodput 'ttft:300 itl_max:30'")
    if shorthand:
        contracts.from_shorthand(shorthand)
        return shorthand, True
    contracts.load(path)
    try:
        return Path(path).read_text(encoding="utf-8"), False
    except OSError as error:
        raise ContractError(f"contract {path!r}: cannot be read: {error.strerror}") from None


def _keep_contract(text: str, is_shorthand: bool, source: Path | None, events: Path) -> None:
    """Leaves the contract with the events, so that a question need not be told it again.

    Another one that is there already stays: an operator may change a contract, and every record names its own by hash.
    """
    promised = contracts.from_shorthand(text) if is_shorthand else contracts.parse(text)
    try:
        contract_file.keep(promised, source, events)
    except ContractError as error:
        message(f"questions will need --contract or --goodput: {error}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_ca_file(path: str) -> None:
    try:
        tls_context(path)
    except OSError as error:
        raise ConfigError(f"--ca-file: {path!r} cannot be used: {error.strerror or error}") from None


def link_engines(events: Path, engines: Path) -> None:
    """Makes the engines' journal a part of this directory, for every question that is asked of it, whoever asks."""
    journal, link = engines.resolve() / "journal" / "engine", events / "journal" / "engine"
    accepted = "accepted: an events directory of this host, with --events of its own"
    if not engines.is_dir():
        raise ConfigError(f"--engine-events: {str(engines)!r} is no directory; {accepted}")
    if engines.resolve() == events.resolve():
        raise ConfigError(f"--engine-events: {str(engines)!r} is --events, which needs no second name; {accepted}")
    try:
        if link.is_symlink() and link.readlink() == journal:
            return
        if link.is_dir() and not link.is_symlink():
            link.rmdir()
        link.symlink_to(journal, target_is_directory=True)
    except OSError as error:
        why = "records of an engine stand there already" if os.path.lexists(link) else error.strerror
        raise ConfigError(
            f"--engine-events: {str(engines)!r} cannot be joined as {str(link)!r}: {why}; {accepted}"
        ) from None


def _check_events(events: Path) -> None:
    try:
        for observer in ("sidecar", "client"):
            (events / "journal" / observer).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=events):
            pass
    except OSError as error:
        raise ConfigError(f"--events: {str(events)!r} cannot be written: {error.strerror}") from None
