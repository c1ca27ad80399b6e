"""A lab's notebook as marimo shows it in a browser: all of it is seen, the green button acts, a cell can be changed."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from chapters.course import find_chapter
from tests.course.course_text import ROOT
from tests.marks import by_night
from tests.processes import wait_for

NO_BROWSER = {"BROWSER": "true", "PYTHONUNBUFFERED": "1"}  # marimo opens none of its own
OPEN_A_COPY = (
    "from pathlib import Path; from chapters import lab_notebook; lab_notebook.open_in_browser(Path({!r}), None)"
)


def answers(address: str) -> bool:
    at = urlsplit(address)
    with socket.socket() as connection:
        return connection.connect_ex((at.hostname, at.port)) == 0


@contextmanager
def opened(*command: str) -> Iterator[str]:
    pytest.importorskip("marimo")
    environment = os.environ | NO_BROWSER
    with subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            address = next(found[0] for line in process.stdout if (found := re.search(r"http://\S+", line)))
            wait_for(lambda: answers(address))  # it says so before it listens
            yield address
        finally:
            os.killpg(process.pid, signal.SIGTERM)


@pytest.fixture(scope="module")
def address():
    with opened("-m", "chapters", "lab", "4", "--browser") as address:
        yield address


@contextmanager
def tab_at(browser, address: str, **options):
    tab = browser.new_page(**options)
    tab.set_default_timeout(120_000)
    tab.goto(address)
    yield tab
    tab.close()


@pytest.mark.parametrize("width", [390, by_night(1300)])
def test_the_green_button_goes_through_a_scene(browser, address, width):
    with tab_at(browser, address, viewport={"width": width, "height": 844}) as tab:
        tab.get_by_role("button", name="start over").click()
        for step in range(1, 4):
            tab.get_by_role("button", name=f"Next: admit ({step} of 10)").click()
        tab.get_by_role("button", name="Next: admit (4 of 10)").wait_for()
        assert tab.get_by_text("AAAA").count() > 0
        assert tab.evaluate("document.documentElement.scrollWidth") <= width


def brightness(color: str) -> float:
    """As WCAG has it: on white a text below 0.2 can be read, on black one above."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", color)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["dark", by_night("light")])
def test_all_that_is_told_is_seen(browser, address, scheme):
    """Every part, in full, as bright as the reader's other windows."""
    with tab_at(browser, address, viewport={"width": 390, "height": 844}, color_scheme=scheme) as tab:
        tab.get_by_role("heading", name="Nobody writes into a shared block").wait_for()
        assert tab.evaluate("document.body.classList.contains('dark')") == (scheme == "dark")
        cut = tab.locator(".output-area").evaluate_all(
            "all => all.filter(each => each.scrollHeight > each.clientHeight + 1).map(each => each.innerText)"
        )
        assert not cut
        painted = tab.locator(".output-area pre span[style*='light-dark']").evaluate_all(
            "all => all.map(each => getComputedStyle(each).color)"
        )
        assert painted and all((brightness(color) > 0.2) == (scheme == "dark") for color in painted)
        assert tab.get_by_text("Traceback").count() == 0


@pytest.fixture
def folder_that_lasts():
    """marimo saves nothing by itself below /tmp, where pytest's folders are."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


def test_a_cell_can_be_changed(browser, folder_that_lasts):
    """And lab.py keeps the change (playing.HOW_TO_CHANGE)."""
    copy = shutil.copyfile(find_chapter(4).folder / "lab.py", folder_that_lasts / "lab.py")
    with opened("-c", OPEN_A_COPY.format(str(copy))) as address, tab_at(browser, address) as tab:
        tab.get_by_role("heading", name="Nobody writes into a shared block").wait_for()
        cell = tab.locator(".marimo-cell", has_text='story.part("The same requests, the same memory")')
        cell.locator(".cm-content").click()
        tab.keyboard.press("Control+End")
        tab.keyboard.type('\nstory.say("My own words")')
        tab.keyboard.press("Control+Enter")
        cell.locator(".output-area", has_text="My own words").wait_for()
        wait_for(lambda: "My own words" in copy.read_text("utf-8"))


def test_parts_that_wait_say_so(browser):
    with opened("-m", "chapters", "lab", "7", "--browser") as address, tab_at(browser, address) as tab:
        tab.get_by_role("button", name="Run the parts below").wait_for()
        tab.get_by_text("The parts below wait for the button above.").wait_for()
        tab.get_by_text("Ancestor stopped").nth(10).wait_for()
        assert tab.get_by_role("button", name="Next: demo (1 of 9)").is_enabled()
