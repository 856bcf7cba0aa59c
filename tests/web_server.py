"""A web server that serves a folder, and can be told to fail."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

Fault = Callable[["Handler", int], bool]


class Handler(SimpleHTTPRequestHandler):
    """Serves files, and appends each path to ``requests`` and the size of each answer to ``sent``.

    The function ``fault`` gets the handler and the number of the request. If it returns true, it has answered.
    """

    requests: list[str]
    sent: list[int]
    fault: Fault | None

    def do_GET(self) -> None:
        self.requests.append(self.path)
        path = Path(self.translate_path(self.path))
        if type(self).fault is not None and type(self).fault(self, len(self.requests)):
            return
        self.sent.append(path.stat().st_size if path.is_file() else 0)
        super().do_GET()

    def log_message(self, *arguments: object) -> None: ...


class Server(ThreadingHTTPServer):
    """A server at a port of 127.0.0.1."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.handler = type("Requests", (Handler,), {"requests": [], "sent": [], "fault": None})
        super().__init__(("127.0.0.1", port), partial(self.handler, directory=str(folder)))
        self.folder, self.url = folder, f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serving(folder: Path, port: int = 0) -> Iterator[Server]:
    server = Server(folder, port)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class Clock:
    """A replacement of the module `time` whose time passes only in pauses, which end at once."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def truncate(handler: Handler, number: int) -> bool:
    """Break off every second answer in its middle."""
    path = Path(handler.translate_path(handler.path))
    if number % 2 == 0 or not path.is_file():
        return False
    content = path.read_bytes()
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content[: len(content) // 2])
    return True


def send_slowly(handler: Handler, number: int, pauses: Sequence[float]) -> bool:
    """Send a file in as many parts as there are pauses, with a pause in seconds before each part."""
    content = Path(handler.translate_path(handler.path)).read_bytes()
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    for part, pause in enumerate(pauses):
        time.sleep(pause)
        with suppress(ConnectionError):  # the client has given up
            handler.wfile.write(content[part * len(content) // len(pauses) : (part + 1) * len(content) // len(pauses)])
    return True


def answer(status: int, headers: dict[str, str] | None = None, name: str = "", content: bytes = b"") -> Fault:
    """Return a fault that answers requests for paths with ``name`` by a status code and this content."""

    def fault(handler: Handler, number: int) -> bool:
        if name in handler.path:
            handler.send_response(status)
            for key, value in (headers or {}).items():
                handler.send_header(key, value)
            handler.send_header("Content-Length", str(len(content)))
            handler.end_headers()
            handler.wfile.write(content)
        return name in handler.path

    return fault
