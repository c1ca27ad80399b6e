"""A browser for the tests of the site: Debian's chromium, or the one that playwright has installed."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

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
