"""A report that a browser shows while its runs go on.

The page is served on the loopback address only, and nothing is written. It asks for the version of
its runs from time to time, and loads itself again when their files have changed.
"""

import html
import threading
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from fedjax_peft.report.records import find_runs
from fedjax_peft.support.errors import InputError

HOST = "127.0.0.1"
_SHARE = 0.25
"""The largest share of a processor that making the page again and again may take."""


def server(
    paths: Sequence[Path], render: Callable[[str], str], *, port: int = 0
) -> ThreadingHTTPServer:
    """Returns the server of a page; its ``serve_forever`` answers.

    Args:
        paths: Runs, or folders of runs.
        render: Version -> page, from the files as they are now. What it raises as
            :class:`InputError` is shown instead, such as that no run has begun.
        port: 0: any free one.

    Raises:
        InputError: a path does not exist, or the port is not free.
    """
    if missing := [path for path in paths if not path.exists()]:
        raise InputError(f"{missing[0]} does not exist.")
    page = _Page(paths, render)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # Another site's page, whose name is made to point here, has its own name as the host.
            # A browser leaves out the port 80.
            host = self.headers.get("Host", "").lower().partition(":")[0]
            known = host in (HOST, "localhost")
            if self.path == "/" and known:
                self._answer(page.text().encode(errors="replace"), "text/html; charset=utf-8")
            elif self.path == "/version" and known:
                self._answer(page.version().encode(), "text/plain")
            else:
                self.send_error(404)

        def _answer(self, content: bytes, kind: str) -> None:
            self.send_response(200)
            headers = {"Content-Type": kind, "Content-Length": str(len(content))}
            for name, value in (headers | {"Cache-Control": "no-store"}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            """Prints nothing for a request."""

    try:
        return ThreadingHTTPServer((HOST, port), Handler)
    except (OSError, OverflowError) as error:
        raise InputError(f"The port {port} cannot be used: {error}. Try another --port.") from error


class _Page:
    """The page, made again when the runs' files have changed."""

    def __init__(self, paths: Sequence[Path], render: Callable[[str], str]) -> None:
        self._paths, self._render = paths, render
        self._lock = threading.Lock()  # matplotlib draws in one thread at a time
        self._version, self._text, self._until = "", "", 0.0

    def version(self) -> str:
        """Returns a text that changes with the runs' files, not too often."""
        if self._version and time.monotonic() < self._until:
            return self._version
        files = [run / "metrics.jsonl" for path in self._paths for run in find_runs(path)]
        stats = [(file, file.stat()) for file in files]
        text = "".join(f"{file} {stat.st_mtime_ns} {stat.st_size}\n" for file, stat in stats)
        return sha256(text.encode(errors="replace")).hexdigest()[:16]

    def text(self) -> str:
        """Returns the current page."""
        with self._lock:
            version, start = self.version(), time.thread_time()
            if version != self._version:
                try:
                    self._text = self._render(version)
                except InputError as error:
                    again = '<meta http-equiv="refresh" content="2">'
                    return f"<!doctype html>{again}<p>{html.escape(str(error))}</p>"
                rest = (time.thread_time() - start) / _SHARE
                self._version, self._until = version, time.monotonic() + rest
            return self._text
