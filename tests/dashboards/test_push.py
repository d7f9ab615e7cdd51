"""Pushing to a real HTTP server that answers as Grafana does."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dashboards import push
from sloscope.errors import ConfigError, DashboardError
from tests.dashboards.test_cli import run

FILES = {"grafana/one.json": '{"uid": "u1", "title": "One"}', "grafana/two.json": '{"uid": "u2", "title": "Two"}'}


class Grafana:
    """Takes dashboards from whoever has the token; remembers what it was sent."""

    def __init__(self) -> None:
        self.taken: list[dict[str, Any]] = []
        self.answer = b""  # instead of Grafana's own, when set
        grafana = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if self.headers["authorization"] != "Bearer secret":
                    self.reply(401, b'{"message": "Invalid API key"}')
                elif self.path != "/api/dashboards/db":
                    self.reply(404, b"not found")
                else:
                    grafana.taken.append(body)
                    uid = body["dashboard"]["uid"]
                    self.reply(200, grafana.answer or json.dumps({"uid": uid, "url": f"/d/{uid}/x"}).encode())

            def reply(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def grafana() -> Iterator[Grafana]:
    made = Grafana()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def test_every_dashboard_replaces_the_one_with_its_uid(grafana: Grafana) -> None:
    rows = list(push.push(FILES, grafana.url, "secret", "team"))
    assert rows == [
        {"file": "grafana/one.json", "uid": "u1", "url": f"{grafana.url}/d/u1/x"},
        {"file": "grafana/two.json", "uid": "u2", "url": f"{grafana.url}/d/u2/x"},
    ]
    assert [(body["dashboard"]["uid"], body["overwrite"], body["folderUid"]) for body in grafana.taken] == [
        ("u1", True, "team"),
        ("u2", True, "team"),
    ]


def test_a_refusal_is_told_in_the_words_of_grafana(grafana: Grafana) -> None:
    with pytest.raises(DashboardError, match=r"grafana/one.json: refused by Grafana with 401: Invalid API key"):
        list(push.push(FILES, grafana.url, "wrong"))
    assert grafana.taken == []


def test_a_server_that_is_no_grafana_is_named(grafana: Grafana) -> None:
    with pytest.raises(DashboardError, match="refused by Grafana with 404: no reason given"):
        list(push.push(FILES, grafana.url + "/elsewhere", "secret"))
    grafana.answer = b"<html>"
    with pytest.raises(DashboardError, match="the answer is not Grafana's"):
        list(push.push(FILES, grafana.url, "secret"))


def test_nobody_listening_is_one_line() -> None:
    with pytest.raises(DashboardError, match=r"--url: 'http://127.0.0.1:1' cannot be reached"):
        list(push.push(FILES, "http://127.0.0.1:1", "secret"))


@pytest.mark.parametrize("url", ["127.0.0.1:3000", "ftp://x", ""])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"--url: .* is not accepted"):
        list(push.push(FILES, url, "secret"))


def test_a_token_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(push.TOKEN_VARIABLE, " from-environment\n")
    assert push.token(None) == "from-environment"
    (tmp_path / "token").write_text("from-file\n")
    assert push.token(tmp_path / "token") == "from-file"


@pytest.mark.parametrize("content", [b"", b" \n", b"two words", b"\xff\xfe", "ü".encode()])
def test_a_file_without_a_token_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(ConfigError, match="--token-file: "):
        push.token(tmp_path / "token")


def test_the_command_prints_what_it_pushed(grafana: Grafana, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    done = run("dashboards", "push", "--url", grafana.url, "--token-file", str(tmp_path / "token"), "--format", "json")
    assert done.returncode == 0, done.stderr
    assert [row["uid"] for row in json.loads(done.stdout)] == ["sloscope-overview", "sloscope-engine-against-receipt"]
    assert [body["dashboard"]["title"] for body in grafana.taken] == ["SLO overview", "Engine against receipt"]
