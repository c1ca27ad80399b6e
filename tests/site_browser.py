"""A browser for the tests of pages: Debian's chromium, or the one that playwright has installed."""

import time
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


MISSING = """async () => {
    const loaded = [location.href, ...performance.getEntriesByType("resource").map(({ name }) => name)];
    const here = loaded.filter(url => url.startsWith("http") && !url.includes("/model/"));
    const kept = await Promise.all(here.map(url => caches.match(url, { ignoreSearch: true })));
    return here.filter((url, at) => !kept[at]);
}"""


def wait_until_kept(tab) -> None:
    """The service worker has kept what this page has loaded: it may be left, and is there without a network."""
    wait_until_none(tab, MISSING)


def wait_until_none(tab, script: str) -> None:
    """For a script whose answer is a promise of a list, which becomes empty."""
    end = time.monotonic() + 60
    while left := tab.evaluate(script):
        assert time.monotonic() < end, left
        tab.wait_for_timeout(20)


def go_offline(tab) -> None:
    """As soon as the page is kept, and its service worker answers for the site's pages."""
    wait_until_kept(tab)
    tab.evaluate("""() => new Promise(begun => {
        const { serviceWorker } = navigator;
        serviceWorker.addEventListener("controllerchange", begun);
        if (serviceWorker.controller) begun();
    })""")
    tab.context.set_offline(True)


def assert_accessible(tab, impacts: tuple[str, ...] = ("serious", "critical"), **options) -> None:
    """A checker of accessibility finds nothing of these impacts."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python").Axe()
    found = axe.run(tab, options={"resultTypes": ["violations"], **options}).response["violations"]
    said = [(tab.url, each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in impacts]
    assert not said, said
