"""Sealed: the quizzes of a student's edition of the course, which are asked, and not shown to whoever opens a file.

(In pages, too: site/quiz.py.) A seal is like an answer that is printed upside down: nobody reads it by accident, and no
search finds it. It is no secret. The course has to open it on the student's machine, so whoever calls unseal() can open
it, too. What must stay a secret, such as our solutions of the exercises, is not in the edition at all.
"""

import base64
import zlib


def seal(text: str) -> str:
    return base64.b85encode(zlib.compress(text.encode(), 9)).decode()


def unseal(text: str) -> str:
    return zlib.decompress(base64.b85decode(text)).decode()
