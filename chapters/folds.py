"""Folds: what a text hides behind a sentence, for GitHub and pages. A terminal cannot hide it, and shows the sentence.

In a text it is

    <details><summary>The sentence, with <code>code</code>.</summary>

    What is hidden, in Markdown.

    </details>
"""

import re

FOLD = re.compile(r"<details><summary>(.*?)</summary>\n\n(.*?)\n\n</details>", re.DOTALL)


def unfolded(text: str) -> str:
    """The same Markdown with every fold open: its sentence, in italics, and what was hidden."""
    return FOLD.sub(lambda fold: f"*{in_markdown(fold[1])}*\n\n{fold[2]}", text)


def in_markdown(sentence: str) -> str:
    return re.sub(r"</?code>", "`", sentence)
