"""Real programs for the end-to-end tests: ours by their commands, Prometheus and nginx from the system."""

import json
import os
import shutil
import socket
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode

import httpx
import pytest

from sloscope.demo.processes import Child, Stage
from sloscope.journal import Tail, journal_files, read_journal
from sloscope.records import Record
from tests.waiting import until


def need(program: str) -> str:
    """The program's path. Where nothing may be skipped, its absence is a failure."""
    path = shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")
    if path is None:
        if os.environ.get("SLOSCOPE_NO_SKIP"):
            pytest.fail(f"{program} is not installed, and nothing may be skipped here")
        pytest.skip(f"{program} is not installed")
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_server(stage: Stage, events: Path, *options: str, model: str = "builtin", name: str = "server") -> str:
    """The reference server's base URL."""
    child = stage.sloscope(
        name, "serve", "--model", model, "--listen", "127.0.0.1:0", "--events", str(events), *options
    )
    return str(child.wait_for(r"on (http://\S+)", 60)[1])


def start_sidecar(
    stage: Stage,
    upstream: str,
    events: Path,
    *options: str,
    goodput: str = "ttft:300 itl_max:30",
    name: str = "sidecar",
) -> tuple[str, str, Child]:
    """(proxy URL, control URL, process) of a sidecar."""
    contract = () if "--contract" in options else ("--goodput", goodput)
    child = stage.sloscope(
        name, "sidecar", "--upstream", upstream, "--listen", "127.0.0.1:0", "--control", "127.0.0.1:0",
        "--events", str(events), *contract, *options,
    )  # fmt: skip
    match = child.wait_for(r"listening on (http://\S+).*control on (http://\S+)", 30)
    return match[1].rstrip(","), match[2], child


class Follower:
    """A growing events directory: each read gives the records that came since the last."""

    def __init__(self, events: Path) -> None:
        self._events = events
        self._tails: dict[Path, Tail] = {}

    def read(self) -> list[Record]:
        found: list[Record] = []
        for path in journal_files(self._events):
            found += read_journal(self._tails.setdefault(path, Tail(path)))
        return found


class Prometheus:
    """A real Prometheus on loopback that scrapes once a second."""

    def __init__(self, stage: Stage, directory: Path, targets: Mapping[str, str], rules: Path | None = None) -> None:
        program = need("prometheus")
        directory.mkdir(parents=True, exist_ok=True)
        jobs = "".join(
            f"  - job_name: {job}\n    static_configs: [{{targets: ['{url.removeprefix('http://')}']}}]\n"
            for job, url in targets.items()
        )
        rule_files = f"rule_files: ['{rules}']\n" if rules else ""
        config = directory / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}\n"
            f"{rule_files}scrape_configs:\n{jobs}"
        )
        self.url = f"http://127.0.0.1:{free_port()}"
        stage.start(
            "prometheus", program, f"--config.file={config}", f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address={self.url.removeprefix('http://')}", "--storage.tsdb.retention.time=1h",
        )  # fmt: skip
        until(lambda: httpx.get(f"{self.url}/-/ready").status_code == 200, 30)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Instant query; an expression that Prometheus refuses is an assertion with its own words."""
        # Not by httpx, which makes a TLS context for each call: 20 ms, hundreds of times.
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/query?{urlencode({'query': expression})}") as body:
                answer = json.load(body)
        except HTTPError as error:
            with error:
                answer = json.load(error)
        assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
        result = answer["data"]["result"]
        return result if answer["data"]["resultType"] != "scalar" else [{"metric": {}, "value": result}]

    def value(self, expression: str) -> float | None:
        rows = self.query(expression)
        return float(rows[0]["value"][1]) if rows else None

    def up(self, job: str) -> bool:
        return self.value(f'up{{job="{job}"}}') == 1


def start_nginx(stage: Stage, directory: Path, upstream: str, location: str, name: str = "nginx") -> str:
    """A real nginx in front of `upstream`; `location` holds its proxy directives. Its URL."""
    program = need("nginx")
    directory.mkdir(parents=True, exist_ok=True)
    port = free_port()
    paths = "".join(
        f"{kind}_temp_path {directory / kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = directory / "nginx.conf"
    config.write_text(
        f"user root;\npid {directory / 'nginx.pid'};\nerror_log {directory / 'error.log'};\nworker_processes 1;\n"
        "events { worker_connections 512; }\n"
        f"http {{\naccess_log off;\n{paths}"
        f"server {{ listen 127.0.0.1:{port};\nlocation / {{ proxy_pass {upstream};\n{location}\n}} }} }}\n"
    )
    stage.start(
        name, program, "-p", str(directory), "-c", str(config), "-g", "daemon off;", "-e", str(directory / "early.log")
    )
    url = f"http://127.0.0.1:{port}"

    def listens() -> bool:
        with socket.create_connection(("127.0.0.1", port), 1):
            return True

    until(listens, 10)
    return url
