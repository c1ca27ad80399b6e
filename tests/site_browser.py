"""A browser for the tests of the site: Debian's chromium, or the one that playwright has installed."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest


@contextmanager
def chromium() -> Iterator:
    """Skips the test, with the reason, where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install -e '.[test]'")
    with sync_api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        except sync_api.Error as error:
            pytest.skip(f"no chromium (apt install chromium, or playwright install chromium): {error}")
        yield browser
        browser.close()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The folder's address on a server of files."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
