"""Lessons with the model on a page: what one can do in chapters 1, 8 and 13, and what there is to see then.

A lesson is an object whose methods are what the page's buttons and sliders ask for. It gets the values of all inputs
and draws HTML; the page (model.js) knows nothing of what a lesson is about.
"""

import importlib
import json
from typing import Any

from chapters.site.model.engine import PageEngine
from chapters.words import words_of

LESSONS = {1: "next_token", 8: "reshaping", 13: "drafts"}
Values = dict[str, str]  # of a page's inputs, by name


class Words:
    """The tokenizer, as kernels.js has it."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def encode(self, text: str) -> list[int]:
        """Raises ValueError for an empty text."""
        token_ids = json.loads(self.model.encode(text))
        if not token_ids:
            raise ValueError("Type some text, at least one letter.")
        return token_ids

    def decode(self, token_ids: list[int]) -> str:
        return self.model.decode(json.dumps(token_ids)) if token_ids else ""

    def piece(self, token_id: int) -> str:
        """A token as a text that shows its spaces and line ends."""
        return self.decode([token_id]).replace("\n", "⏎").replace(" ", "·") or f"<{token_id}>"


class Lesson:
    """What all lessons have. model: page_model of worker.js, with layout, step(), encode() and decode()."""

    def __init__(self, model: Any) -> None:
        self.engine = PageEngine(json.loads(model.layout), model.step)
        self.words = Words(model)
        self.said = ""
        self.has_begun = False  # a text has been taken

    def do(self, act: str, values: Values) -> dict[str, Any]:
        """Call a method. What there is to see; more: the page shall ask for the next step.

        Raises ValueError, with a text for the page, for what cannot be done.
        """
        if act != "begin" and not self.has_begun:
            raise ValueError(words_of(values.get("language", "en"))("lesson.begin_first"))
        more = getattr(self, f"on_{act}")(values)
        self.has_begun = True
        return {"panels": self.panels(values), "said": self.said, "more": bool(more)}

    def panels(self, values: Values) -> list[tuple[str, str]]:
        """(title, HTML)"""
        raise NotImplementedError


def begin_lesson(chapter: int, model: Any = None) -> Lesson:
    """model: that of the page, if it is not given."""
    if model is None:
        import page_model

        model = page_model
    module = importlib.import_module(f"chapters.site.model.{LESSONS[chapter]}")
    return module.Lesson(model)
