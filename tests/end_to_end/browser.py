"""A real Chromium, pages for it, and what they report: a page tells its result by a POST to the server that gave it."""

import json
import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

from sloscope.demo.processes import Child, Stage
from tests.end_to_end.support import need

MODULES = Path(str(files("sloscope"))) / "client" / "browser"
_TYPES = {".html": "text/html; charset=utf-8", ".js": "text/javascript", ".json": "application/json"}


class Pages:
    """Serves what it is told to, the modules under /sloscope/, and keeps what pages post to /result."""

    def __init__(self, pages: Mapping[str, str]) -> None:
        self._pages = {path: text.encode() for path, text in pages.items()}
        for module in MODULES.glob("*.js"):
            self._pages[f"/sloscope/{module.name}"] = module.read_bytes()
        self.results: queue.Queue[Any] = queue.Queue()
        pages_of = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = pages_of._pages.get(self.path.partition("?")[0])
                self._answer(404 if body is None else 200, body or b"")

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                pages_of.results.put(json.loads(body))
                self._answer(204, b"")

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("content-type", _TYPES.get(Path(self.path.partition("?")[0]).suffix, "text/plain"))
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def add(self, path: str, text: str) -> None:
        self._pages[path] = text.encode()

    def result(self, timeout_s: float = 60) -> Any:
        """The next one. What went wrong in a page comes as {"error": …}."""
        found = self.results.get(timeout=timeout_s)
        assert not (isinstance(found, dict) and "error" in found), found["error"]
        return found


@contextmanager
def serving(pages: Mapping[str, str]) -> Iterator[Pages]:
    served = Pages(pages)
    thread = threading.Thread(target=served.server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield served
    finally:
        served.server.shutdown()
        thread.join()
        served.server.server_close()


def page(script: str) -> str:
    """A page that runs this module; `tell(result)` posts to /result, and so does an error that nobody caught."""
    return f"""<!doctype html><meta charset="utf-8"><title>page</title><script type="module">
const tell = (result) => fetch("/result", {{ method: "POST", body: JSON.stringify(result) }});
addEventListener("error", (event) => tell({{ error: event.message }}));
addEventListener("unhandledrejection", (event) => tell({{ error: String(event.reason?.stack ?? event.reason) }}));
{script}
</script>"""


def open_chromium(stage: Stage, directory: Path, url: str, name: str = "chromium") -> Child:
    return stage.start(
        name, need("chromium"), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", "--disable-extensions", "--disable-component-update", "--disable-background-networking",
        "--disable-popup-blocking",
        f"--user-data-dir={directory}", url,
    )  # fmt: skip
