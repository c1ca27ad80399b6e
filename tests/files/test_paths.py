"""Paths that cannot be told to the libraries which read checkpoints: named as the culprit."""

import os
import sys

import pytest

from nanovllm import LLM
from nanovllm.files.hub import check_path
from tests.checkpoints import SMALL, make_checkpoint

RESOLVE = "import os, sys; from nanovllm.files.hub import resolve_checkpoint; resolve_checkpoint(sys.argv[1])"


def test_letters_that_are_not_ascii_are_no_problem(tmp_path):
    folder = make_checkpoint(tmp_path / "mod\u00e8le \u6a21\u578b", "llama")
    assert LLM(str(folder), **SMALL).generate([[5, 6]], use_tqdm=False)


def test_a_name_that_python_has_not_understood(checkpoint, tmp_path):
    """Bytes of UTF-8, each for itself, as Python sees them where names are ASCII; and bytes that are no UTF-8."""
    for name in ("mod\udcc3\udca8le", "mod\udce8le"):
        os.symlink(checkpoint(), tmp_path / name)
        for options in ({}, {"tokenizer": str(tmp_path / name)}):
            model = checkpoint() if options else tmp_path / name
            with pytest.raises(ValueError, match=r"the path '.*mod\\udc.*le' is no valid UTF-8; rename it"):
                LLM(str(model), **options, **SMALL)


@pytest.mark.skipif(sys.platform == "win32", reason="names are Unicode there")
def test_where_the_locale_is_ascii(tmp_path, processes):
    (tmp_path / "mod\u00e8le").mkdir()
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    status, _, err = processes.run("-c", RESOLVE, str(tmp_path / "mod\u00e8le"), env=os.environ | environment)
    assert status == 1 and "takes names of files to be in ascii" in err
    assert "set LC_ALL=C.UTF-8 or PYTHONUTF8=1" in err


def test_names_of_the_hub_are_paths_too():
    check_path("Qwen/Qwen3-0.6B")
