"""Ctrl-C in the middle of the first import."""

import pytest

from nanovllm import LLM
from tests.errors import expect
from tests.marks import by_night

# Before 3.12 Python makes a RuntimeError of what is raised in a __set_name__: a KeyboardInterrupt, too.
PROGRAM = """
import sys

def interrupt(frame, event, arg):
    is_field = frame.f_code.co_name == "__set_name__" and "dataclasses" in frame.f_code.co_filename
    if is_field and sys.argv[2] in sys.modules:
        sys.settrace(None)
        raise KeyboardInterrupt

sys.settrace(interrupt)
try:
    from nanovllm import LLM
    LLM(sys.argv[1], max_model_len=64)
except BaseException as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize("package", [by_night("torch"), "transformers"])
def test_ctrl_c_while_a_package_is_imported(checkpoint, processes, package):
    *_, said = processes.run("-c", PROGRAM, str(checkpoint()), package)[1].splitlines()
    assert said == "KeyboardInterrupt"


def test_an_error_of_an_llm_that_is_made_after_ctrl_c():
    """It is what it is: the interruption came before."""
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        expect("nowhere", LLM, "/nowhere/at/all", error=FileNotFoundError)
