"""Sealed: what a student's edition of the course holds, but does not show to whoever opens a file.

Sealed are the quizzes (in pages, too: site/quiz.py), and our solutions of those chapters whose lab or checks compute
with them. A seal is like an answer that is printed upside down: nobody reads it by accident, and no search finds it. It
is no secret. The course has to open it on the student's machine, so whoever calls unseal() can open it, too.
"""

import base64
import importlib
import zlib
from types import ModuleType


def seal(text: str) -> str:
    return base64.b85encode(zlib.compress(text.encode(), 9)).decode()


def unseal(text: str) -> str:
    return zlib.decompress(base64.b85decode(text)).decode()


def solution_of(folder: str) -> ModuleType:
    """Our solutions of the chapter in this folder: solution.py, or what stands for it in a student's edition."""
    try:
        return importlib.import_module(f"chapters.{folder}.solution")
    except ModuleNotFoundError as error:
        if error.name != f"chapters.{folder}.solution":  # torch is missing, for instance
            raise
        return importlib.import_module(f"chapters.{folder}.solution_sealed")
