"""What a JSON schema says of a text, as regular expressions for all of it: for texts that have no quotes, and names."""

import re

from nanovllm.features.grammar.parts import Schema

ANYTHING = "(?s:.*)"
MAX_LENGTH = 5000  # characters that are counted
TOKENS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_LONG, _SHORT = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])", "(0[469]|11)-(0[1-9]|[12][0-9]|30)"
_DAY = f"[0-9]{{4}}-({_LONG}|{_SHORT}|02-(0[1-9]|1[0-9]|2[0-8]))"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE, _LABEL = "(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])", "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
FORMATS = {  # those that llguidance knows; some texts that fit are left out
    "date": _DAY,
    "time": _TIME,
    "date-time": f"{_DAY}T{_TIME}",
    "duration": "P([0-9]+W|[0-9]+D|T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S))",
    "email": r"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@[A-Za-z0-9]+(-[A-Za-z0-9]+)*(\.[A-Za-z0-9]+(-[A-Za-z0-9]+)*)+",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": "([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[!-~]+",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}


def whole(pattern: str) -> str | None:
    """The same pattern, written to match a whole text. None if an anchor inside it makes that impossible here."""
    alternatives: list[list[str]] = [[]]
    depth = 0
    for token in TOKENS.findall(pattern):
        depth += (token == "(") - (token == ")")
        if token == "|" and depth == 0:
            alternatives.append([])
        else:
            alternatives[-1].append(token)
    found = []
    for tokens in alternatives:
        begins = tokens[:1] == ["^"]
        ends = tokens[begins:][-1:] == ["$"]
        inside = tokens[begins : len(tokens) - ends]
        if "^" in inside or "$" in inside:
            return None
        found.append(f"{'' if begins else ANYTHING}(?:{''.join(inside)}){'' if ends else ANYTHING}")
    return "|".join(found)


def fits_of(part: Schema) -> tuple[list[str], list[str]]:
    """Regular expressions for all of a text that fits; keywords that could not be said so.

    A format that is not in FORMATS is an annotation.
    """
    fits: list[str] = []
    left_out: list[str] = []
    bounds = {name: part[name] for name in ("minLength", "maxLength") if name in part}
    if all(isinstance(bound, int) and 0 <= bound <= MAX_LENGTH for bound in bounds.values()):
        fits += [f"(?s:.{{{bounds.get('minLength', 0)},{bounds.get('maxLength', '')}}})"] if bounds else []
    else:
        left_out += bounds
    if isinstance(pattern := part.get("pattern"), str):
        found = whole(pattern)
        fits += [] if found is None else [found]
        left_out += ["pattern"] if found is None else []
    if isinstance(name := part.get("format"), str) and name in FORMATS:
        fits.append(FORMATS[name])
    return fits, left_out
