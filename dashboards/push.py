"""Dashboards into a running Grafana, over its HTTP API."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx

from sloscope.errors import ConfigError, DashboardError

TOKEN_VARIABLE = "GRAFANA_TOKEN"
_TIMEOUT_S = 20.0


def token(path: Path | None) -> str:
    """A service account's token, from a file or the environment: never from the command line, where others read it."""
    if path is None:
        found = os.environ.get(TOKEN_VARIABLE, "").strip()
    else:
        try:
            found = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            raise ConfigError(f"--token-file: {str(path)!r} cannot be read") from None
    if not found or not found.isascii() or any(character.isspace() for character in found):
        raise ConfigError(f"--token-file: gives no token; accepted: a file with one, or {TOKEN_VARIABLE}")
    return found


def push(files: Mapping[str, str], url: str, bearer: str, folder: str = "") -> Iterator[dict[str, str]]:
    """Creates or replaces each dashboard by its uid. DashboardError with Grafana's own words where it refuses one."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url: {url!r} is not accepted; accepted: http://HOST[:PORT] or https://…")
    with httpx.Client(base_url=url, headers={"authorization": f"Bearer {bearer}"}, timeout=_TIMEOUT_S) as grafana:
        for name, text in files.items():
            body = {"dashboard": json.loads(text), "overwrite": True, "message": "sloscope dashboards push"}
            try:
                answer = grafana.post("/api/dashboards/db", json=body | ({"folderUid": folder} if folder else {}))
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise DashboardError(f"--url: {url!r} cannot be reached: {error}") from None
            if answer.status_code != 200:
                raise DashboardError(f"{name}: refused by Grafana with {answer.status_code}: {_said(answer)}")
            yield {"file": name, "uid": str(body["dashboard"]["uid"]), "url": url.rstrip("/") + _path(answer)}


def _path(answer: httpx.Response) -> str:
    try:
        return str(answer.json().get("url", ""))
    except (ValueError, AttributeError):
        raise DashboardError("--url: the answer is not Grafana's; accepted: the address of a Grafana") from None


def _said(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["message"])[:200]
    except (ValueError, KeyError, TypeError):
        return "no reason given"
