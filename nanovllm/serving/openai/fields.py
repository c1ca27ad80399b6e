"""A body's fields that no endpoint knows: clients send new ones before servers know them. They are left out, and who
sent them is told: in a header of the answer (of a batch job, in the record), and once in the log.

A field that is known and asks for what this engine does not do is refused (compat/names.py).
"""

import difflib
import logging
from typing import Any

from nanovllm.compat.names import TABLES
from nanovllm.serving.openai.openai_request import KNOWN_BY_URL

logger = logging.getLogger("nanovllm")

KNOWN = set().union(TABLES["body"], *KNOWN_BY_URL.values())
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")  # the last: of what is encrypted
MAX_NAMED, MAX_CHARS = 10, 40  # of names in a warning, of characters in a name
_told: set[str] = set()  # names that the log has
MAX_TOLD = 100


def without_unknown(body: dict[str, Any], known: Any = KNOWN) -> tuple[dict[str, Any], list[str]]:
    """The body without nulls and without fields that nobody knows; their names, as a warning shows them."""
    body = {name: value for name, value in body.items() if value is not None}
    unknown = [name for name in body if name not in known]
    for name in unknown:
        if name not in _told and len(_told) < MAX_TOLD:
            _told.add(name)
            logger.warning(
                f"a field that nobody here knows was left out of a request: {_shown(name, known)}; said once"
            )
    shown = [_shown(name, known if place < MAX_NAMED else ()) for place, name in enumerate(unknown)]
    return {name: value for name, value in body.items() if name in known}, shown


def _shown(name: str, known: Any) -> str:
    """known: where to look for a name like it, which takes half a millisecond."""
    near = difflib.get_close_matches(name[:MAX_CHARS], known, n=1)
    return f"{name[:MAX_CHARS]!a}{f' (did you mean {near[0]!r}?)' if near else ''}"


def warning_of(names: list[str]) -> str:
    """One line; "" if there are none."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"left out, because nobody here knows it: {', '.join(names[:MAX_NAMED])}{more}" if names else ""


def warning_headers(warning: str) -> dict[str, str]:
    """HTTP's field for it (RFC 7234, section 5.5)."""
    text = warning.replace("\\", "\\\\").replace('"', '\\"')
    return {"Warning": f'299 nanovllm "{text}"'} if warning else {}
