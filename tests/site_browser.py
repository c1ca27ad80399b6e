"""A browser for the tests of pages: Debian's chromium, or the one that playwright has installed."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from chapters.site import server


@contextmanager
def chromium() -> Iterator:
    """Skips the test, with the reason, where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[ci]'")
    with sync_api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=server.chromium())
        except sync_api.Error as error:
            pytest.skip(f"needs chromium (apt install chromium, or playwright install chromium): {error}")
        yield browser
        browser.close()


def assert_accessible(tab, impacts: tuple[str, ...] = ("serious", "critical"), **options) -> None:
    """A checker of accessibility finds nothing of these impacts."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python").Axe()
    found = axe.run(tab, options={"resultTypes": ["violations"], **options}).response["violations"]
    said = [(tab.url, each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in impacts]
    assert not said, said
