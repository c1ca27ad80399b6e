"""The shell of every page. All links are relative, so that the site works in any folder of any host."""

import html
import posixpath
from pathlib import Path

from chapters.words import ENGLISH, Words

STYLES, SCRIPTS = ("theme.css", "style.css"), ("kept.js", "site.js", "progress.js")  # in assets/, of every page
LICENCE = "https://creativecommons.org/licenses/by/4.0/"  # chapters/LICENSE
ICON = (  # blocks of memory, in the page itself: one request less, and no 404 from a browser that asks for an icon
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 8 8'%3E"
    "%3Cpath fill='%231f6f8b' d='M0 0h3v3H0zM4 0h4v3H4zM0 4h5v4H0zM6 4h2v4H6z'/%3E%3C/svg%3E"
)


def relative(target: str, page_path: str) -> str:
    """The way from one page of the site to another, or to a file of it."""
    return posixpath.relpath(target, posixpath.dirname(page_path) or ".")


def write(folder: Path, path: str, text: str) -> None:
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(text, "utf-8")


def page(
    title: str,
    body: str,
    path: str,
    scripts: tuple[str, ...] = (),
    styles: tuple[str, ...] = (),
    classic: tuple[str, ...] = (),
    words: Words = ENGLISH,
    others: tuple[tuple[str, str], ...] = (),
) -> str:
    """A whole page. path: its place in the site. scripts (ES modules) and styles: names of files in assets/.

    classic: scripts that are no modules, by their place in the site; modules do not load from file://.
    others: (language, place relative to this page) of the same page in other languages.
    """

    def asset(name: str) -> str:
        return relative(f"assets/{name}", path)

    head = [f'<link rel="stylesheet" href="{asset(name)}">' for name in (*STYLES, *styles)]
    head += ["<noscript><style>.frame[hidden] { display: block; }</style></noscript>"]
    head += [f'<link rel="alternate" hreflang="{language}" href="{place}">' for language, place in others]
    for script in (said_by(words), *(f"assets/{name}" for name in SCRIPTS), *classic):
        head += [f'<script defer src="{relative(script, path)}"></script>']
    head += [f'<script type="module" src="{asset(name)}"></script>' for name in scripts]
    return f"""<!doctype html>
<html lang="{words.language}">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="description" content="{words("page.description")}">
<title>{html.escape(title)}</title>
<link rel="icon" href="{ICON}">
{chr(10).join(head)}
</head>
<body>
<a class="skip" href="#content">{words("page.skip")}</a>
<header class="site"><a class="home" href="{relative("index.html", path)}">nanovllm
<span>{words("page.the_course")}</span></a>
<nav aria-label="{words("page.nav")}"><a href="{relative("index.html", path)}">{words("page.contents")}</a>
<a href="{relative("one_request.html", path)}">{words("page.one_request")}</a>
<a href="{relative("readme.html", path)}">{words("page.engine")}</a></nav>
<form role="search" action="{relative("search.html", path)}"><input type="search" name="q"
placeholder="{words("page.search")}" aria-label="{words("page.search_label")}" autocomplete="off"></form></header>
{body}
<aside class="to-text" aria-label="{words("page.licences")}">{words("page.text_licence")}
<a rel="license" href="{LICENCE}">CC BY 4.0</a>. {words("page.code_licence")}</aside>
</body>
</html>
"""


def said_by(words: Words) -> str:
    """The script with what other scripts say in this language."""
    return f"assets/words.{words.language}.js"


def not_kept(words: Words) -> str:
    """A page that stands in place of one that needs a network; a service worker puts the site's address into it."""
    styles = "".join(f'<link rel="stylesheet" href="assets/{name}">' for name in STYLES)
    return f"""<!doctype html>
<html lang="{words.language}">
<head>
<meta charset="utf-8">
<base href="@SCOPE@">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{words("offline.title")}</title>
{styles}
</head>
<body>
<main class="single">
<h1>{words("offline.title")}</h1>
<p>{words("offline.why")}</p>
<p><a href="index.html">{words("offline.contents")}</a></p>
</main>
</body>
</html>
"""


# What the page leads to, and all that it needs to be shown.
CONTENTS = ("index.html", said_by(ENGLISH), *(f"assets/{name}" for name in (*STYLES, *SCRIPTS)))
