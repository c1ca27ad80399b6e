"""A lab's notebook as marimo shows it in a browser: the green button acts."""

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.course.course_text import ROOT

COMMAND = [sys.executable, "-m", "chapters", "lab", "4", "--browser"]
NO_BROWSER = {"BROWSER": "true", "PYTHONUNBUFFERED": "1"}  # marimo opens none of its own


@pytest.fixture(scope="module")
def address():
    pytest.importorskip("marimo")
    with subprocess.Popen(
        COMMAND, cwd=ROOT, env=os.environ | NO_BROWSER, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            yield next(found[0] for line in process.stdout if (found := re.search(r"http://\S+", line)))
        finally:
            os.killpg(process.pid, signal.SIGTERM)


@pytest.mark.ci
@pytest.mark.parametrize("width", [1300, 390])
def test_the_green_button_goes_through_a_scene(browser, address, width):
    tab = browser.new_page(viewport={"width": width, "height": 844})
    tab.set_default_timeout(120_000)
    tab.goto(address)
    tab.get_by_role("button", name="start over").click()
    for step in range(1, 4):
        tab.get_by_role("button", name=f"Next: admit ({step} of 10)").click()
    tab.get_by_role("button", name="Next: admit (4 of 10)").wait_for()
    assert tab.get_by_text("AAAA").count() > 0
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.close()
