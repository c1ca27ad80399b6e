"""Files of a folder over HTTP: a site to look at, and for benchmarks and tests; and which browser these take."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread


def chromium() -> str | None:
    """The system's, without windows if it has such a one: two thirds of the other's work. None: Playwright's own."""
    return shutil.which("chromium-headless-shell") or shutil.which("chromium")


class Handler(SimpleHTTPRequestHandler):
    """With types of its own: on Windows others come from the registry, and no browser runs a text/plain as a script."""

    extensions_map = SimpleHTTPRequestHandler.extensions_map | {
        ".js": "text/javascript",
        ".mjs": "text/javascript",
        ".css": "text/css",
        ".svg": "image/svg+xml",
    }


class Quiet(Handler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def server_at(host: str, port: int, folder: Path) -> ThreadingHTTPServer:
    """It has the port at once, even if the folder is not there yet. Raises ValueError if it cannot have it."""
    try:
        return _server(folder, host, port, Handler)
    except (OSError, OverflowError) as error:
        raise ValueError(f"--host {host} --port {port}: {error}") from None


def serve(server: ThreadingHTTPServer) -> None:
    """Until Ctrl-C, with a line for each request."""
    host, port = server.server_address[:2]
    print(f"http://{host}:{port}/  (Ctrl-C ends it)")
    server.serve_forever()


@contextmanager
def served(folder: Path, handler: type[SimpleHTTPRequestHandler] = Quiet) -> Iterator[str]:
    """Beside what else goes on; gives the address."""
    with _server(folder, "127.0.0.1", 0, handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def _server(folder: Path, host: str, port: int, handler: type[SimpleHTTPRequestHandler]) -> ThreadingHTTPServer:
    return ThreadingHTTPServer((host, port), partial(handler, directory=str(folder)))
