"""The proxies that are compared: one worker each, on a free port of loopback, nothing buffered and nothing logged."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from benchmarks.streaming.clients import installed
from benchmarks.streaming.sink import KEY

_NGINX = """
worker_processes 1;
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/nginx-error.log;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream source {{ server {host}:{to}; keepalive 256; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://source; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_read_timeout 300s;
    }}
  }}
}}
"""
_HAPROXY = """
global
  nbthread 1
  maxconn 8192
defaults
  mode http
  option http-no-delay
  timeout connect 5s
  timeout client 300s
  timeout server 300s
frontend in
  bind 127.0.0.1:{port}
  default_backend source
backend source
  server s {host}:{to}
"""
_LITELLM = """
model_list:
  - model_name: bench
    litellm_params: {{model: openai/bench, api_base: "http://{host}:{to}/v1", api_key: "{key}"}}
general_settings: {{master_key: "{key}"}}
"""


class Side(NamedTuple):
    name: str
    url: str
    pid: int  # of the process that was started, 0 for none; its children count too
    control: str = ""  # URL of the sidecar's other plane
    version: str = ""
    is_scraped: bool = True


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _listening(port: int, process: subprocess.Popen[bytes], name: str, log: Path, patience_s: float = 60) -> None:
    until_s = time.monotonic() + patience_s
    while time.monotonic() < until_s:
        if process.poll() is not None:
            break
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    said = (log.read_text(errors="replace").strip().splitlines() or ["nothing"])[-1]
    raise RuntimeError(f"{name} did not start; it said: {said}")


@contextmanager
def started(
    name: str, command: list[str], port: int, folder: Path, env: dict[str, str] | None = None
) -> Iterator[Side]:
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **(env or {})}, cwd=folder)
    try:
        _listening(port, process, name, log)
        yield Side(name, f"http://127.0.0.1:{port}", process.pid)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _configured(name: str, text: str, suffix: str, upstream: str, folder: Path) -> tuple[Path, int]:
    port = free_port()
    host, _, to = upstream.removeprefix("http://").rpartition(":")
    path = folder / f"{name}{suffix}"
    path.write_text(text.format(folder=folder, host=host, to=to, port=port, key=KEY), encoding="utf-8")
    return path, port


def _said(program: str) -> str:
    """`nginx 1.22.1`, of what it says with -v."""
    done = subprocess.run([program, "-v"], capture_output=True, text=True, check=True)
    found = re.search(r"\d+\.\d[\w.]*", done.stdout + done.stderr)
    return f"{program} {found[0] if found else 'of unknown version'}"


def _ours(*packages: str) -> str:
    return ", ".join(f"{package} {version(package)}" for package in packages)


@contextmanager
def source(events: int, rate: float, *options: str) -> Iterator[str]:
    """The URL of a source whose answers have so many events, so many a second."""
    command = [sys.executable, "-m", "benchmarks.streaming.source", "--events", str(events), "--rate", str(rate)]
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            yield process.stderr.readline().split()[-1]
        finally:
            process.terminate()


@contextmanager
def direct(upstream: str, folder: Path) -> Iterator[Side]:
    yield Side("direct", upstream, 0)


@contextmanager
def nginx(upstream: str, folder: Path) -> Iterator[Side]:
    config, port = _configured("nginx", _NGINX, ".conf", upstream, folder)
    with started("nginx", ["nginx", "-c", str(config), "-p", str(folder)], port, folder) as side:
        yield side._replace(version=_said("nginx"))


@contextmanager
def haproxy(upstream: str, folder: Path) -> Iterator[Side]:
    config, port = _configured("haproxy", _HAPROXY, ".cfg", upstream, folder)
    with started("haproxy", ["haproxy", "-db", "-f", str(config)], port, folder) as side:
        yield side._replace(version=_said("haproxy"))


@contextmanager
def starlette(upstream: str, folder: Path) -> Iterator[Side]:
    port = free_port()
    app = ["benchmarks.streaming.starlette_proxy:app", "--port", str(port), "--log-level", "error", "--no-access-log"]
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-m", "uvicorn", "--app-dir", root, *app]
    with started("starlette", command, port, folder, {"UPSTREAM": upstream}) as side:
        yield side._replace(version=_ours("starlette", "httpx", "uvicorn"))


@contextmanager
def bare(upstream: str, folder: Path) -> Iterator[Side]:
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.streaming.bare_relay", "--port", str(port)]
    root = str(Path(__file__).parents[2])
    with started("bare", command, port, folder, {"UPSTREAM": upstream, "PYTHONPATH": root}) as side:
        yield side._replace(version=_ours("uvloop"))


@contextmanager
def sidecar(upstream: str, folder: Path) -> Iterator[Side]:
    port, control = free_port(), free_port()
    command = [
        sys.executable, "-m", "sloscope", "sidecar", "--upstream", upstream, "--listen", f"127.0.0.1:{port}",
        "--control", f"127.0.0.1:{control}", "--goodput", "ttft:300 itl_max:100", "--sql-every", "off",
        "--events", str(events_of(folder)),
    ]  # fmt: skip
    with started("sidecar", command, port, folder) as side:
        with urllib.request.urlopen(f"http://127.0.0.1:{control}/health", timeout=30) as answer:
            answer.read()  # then all its processes are there
        yield side._replace(control=f"http://127.0.0.1:{control}", version=_ours("sloscope"))


@contextmanager
def unscraped(upstream: str, folder: Path) -> Iterator[Side]:
    """The sidecar, while nobody asks for its metrics."""
    with sidecar(upstream, folder) as side:
        yield side._replace(name="unscraped", is_scraped=False)


def litellm(python: Path) -> Callable[[str, Path], AbstractContextManager[Side]]:
    release = installed(python, "litellm")

    @contextmanager
    def side(upstream: str, folder: Path) -> Iterator[Side]:
        config, port = _configured("litellm", _LITELLM, ".yaml", upstream, folder)
        command = [str(python.parent / "litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
        with started("litellm", command, port, folder, {"LITELLM_LOG": "ERROR", "NO_DOCS": "True"}) as found:
            yield found._replace(version=release)

    return side


def events_of(folder: Path) -> Path:
    """Where the sidecar of this folder writes."""
    return folder / "events"


def missing(name: str) -> str | None:
    """Why a side cannot run here."""
    return None if name not in ("nginx", "haproxy") or shutil.which(name) else f"{name} is not installed"
