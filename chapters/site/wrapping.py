"""Where the lines of a page may break, in its finished HTML: most of them do so on a phone.

A line of code goes on below its own beginning, and is never torn from its indentation. An option of a command, an
arrow, and a token in quotes with the space that it begins with are kept whole. What is copied from the page stays as it
is: nothing is written into it.
"""

import re

PRE = r"<pre(?! class=.(?:printed|numbered))[^>]*>(?:<span></span>|<code>)*"
CODE = re.compile(f"({PRE})(.*?)((?:</code>)?</pre>)", re.S)
INDENTED = re.compile("((?:<[^>]*>)*)( +)(.*)", re.S)
OTHER = r"<(script|style|svg|math|title|textarea|option)\b.*?</\1>|<[^>]*>"  # no text of the page, or no place for tags
OPTION = r"(?<![\w-])-(?:-?[a-z][\w-]*|&gt;)"
TOKEN = r"(?<![^\s>(\[])(?:&#x27;|&quot;|[\"'“‘]) [^\s<]+"
WHOLE = re.compile(f"{OTHER}|(?P<whole>{OPTION}|{TOKEN})", re.S)


def wrapped(body: str) -> str:
    """The same page, with elements that course.css knows."""
    body = CODE.sub(lambda code: code[1] + "".join(map(line, code[2].splitlines(keepends=True))) + code[3], body)
    return WHOLE.sub(lambda found: f'<span class="whole">{found[0]}</span>' if found["whole"] else found[0], body)


def line(code: str) -> str:
    """Its HTML; each element in it ends in it."""
    if found := INDENTED.match(code):
        tags, spaces, rest = found.groups()
        return f'<span class="line" style="--in: {len(spaces)}">{tags}<span class="in">{spaces}</span>{rest}</span>'
    return f'<span class="line">{code}</span>'
