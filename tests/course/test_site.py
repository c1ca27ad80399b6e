"""The site as a reader finds it: made without a warning, every page in a real browser, every question of every quiz."""

import html
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from chapters import quiz
from chapters.__main__ import main
from chapters.course import EXERCISES
from chapters.site.scenes import Scenes
from chapters.site.server import served, server_at
from chapters.words import ENGLISH
from tests.course.course_text import CHAPTERS, ROOT, for_each_chapter
from tests.course.test_quiz import NUMBERS
from tests.marks import by_night
from tests.site_browser import assert_accessible

pytest.importorskip("myst_parser", reason="needs Sphinx: pip install -e '.[site]'")

from chapters.site import build
from chapters.site.markdown import MARKDOWN, inline_html
from chapters.site.sources import Sources
from chapters.site.text import Place, extend

# A page of each kind; labs and exercises that run: test_site_labs.py
PAGES = ["index.html", "ch01_inference/index.de.html", "source/nanovllm/core/block_manager.py.html"]
PAGES += ["ch06_prefill_decode/lab.html", "source/nanovllm/index.html", "ch06_prefill_decode/exercises.html"]
PAGES += ["search.html?q=block"]
MORE = ["readme.html", "one_request.html", "instructor.html", "ch01_inference/exercises.html"]
MORE += [f"{chapter.folder.name}/index.html" for chapter in CHAPTERS[1::6]]
BUILD = """
import sys
sys.modules.update(torch=None, transformers=None, safetensors=None, marimo=None)
from chapters.__main__ import main
sys.exit(main(["site", "--out", sys.argv[1]]))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """In a folder of a host, not at its root; built where the packages that run models cannot be imported."""
    folder = tmp_path_factory.mktemp("host") / "some" / "where"
    subprocess.run([sys.executable, "-c", BUILD, str(folder)], cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def address(site):
    with served(site.parent.parent) as host:
        yield f"{host}/some/where"


# -- files ------------------------------------------------------------------------------------------------------------


class Found(HTMLParser):
    def __init__(self, page: Path) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.parts: list[str] = []  # what the browser fetches to show the page
        text = page.read_text("utf-8")
        if page.name.endswith((".py.html", ".c.html", ".h.html")):  # most of the site: spans, and an id for each line
            before, begin, rest = text.partition('<pre class="numbered"')
            code, end, after = rest.partition("</pre>")
            assert begin and end and "<a " not in code
            self.ids += re.findall(r'<span class="line" id="(L\d+)">', code)
            text = before + after
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids += [values["id"]] if "id" in values else []
        if tag == "a":
            self.links.append(values["href"])
        elif "src" in values or tag == "link":
            self.parts.append(values.get("src") or values["href"])


def test_links(site):
    """Each leads to a file of the site and to a place in it; nothing that a page needs lies elsewhere."""
    pages = {page: Found(page) for page in site.rglob("*.html")}
    assert len(pages) > 100
    for page, found in pages.items():
        for link in found.links + [part for part in found.parts if not part.startswith("data:")]:
            url = urlsplit(link)
            if url.scheme:
                assert url.scheme == "https" and link in found.links, f"{page} loads {link}"
                continue
            target = (page.parent / url.path).resolve() if url.path else page
            assert target.is_file() and target.is_relative_to(site), f"{page}: {link} is not there"
            state = target.name == "lab.html" and not re.match("part-|story$", url.fragment)
            if url.fragment and not state:  # of a lab that runs in the page
                assert unquote(url.fragment) in pages[target].ids, f"{page}: no place {link}"


def test_links_lead_to_the_line(site):
    """Those of one request's life, and those above the quotes."""
    checked = 0
    for page in ("one_request.html", *(f"{chapter.folder.name}/index.html" for chapter in CHAPTERS)):
        text = (site / page).read_text("utf-8")
        text = re.sub(r'<code[^>]*><span class="pre">([^<]*)</span></code>', r"<code>\1</code>", text)
        links = re.findall(r'<a href="([^"#]+)#L(\d+)"><code>([\w.]+)</code></a>', text)
        links += re.findall(r'<strong><a href="([^"#]+)#L(\d+)"><code>[^<]+</code></a> · <code>([\w.]+)</code>', text)
        for target, line, symbol in links:
            source = ROOT / (site / page).parent.joinpath(target).resolve().relative_to(site / "source")
            lines = source.with_suffix("").read_text("utf-8").splitlines()[int(line) - 1 :][:4]  # decorators first
            assert symbol.split(".")[-1] in "\n".join(lines), f"{target}#L{line} is not {symbol}"
            checked += 1
    assert checked > 100


def written(text: str) -> str:
    """HTML of a text of chapter 4 after the rule of the pages."""
    place = Place("chapters/ch04_paged_attention/README.md", "ch04_paged_attention/index.html", Sources())
    return MARKDOWN.renderer.render(extend(MARKDOWN.parse(text), place), MARKDOWN.options, {})


def test_a_link_to_nothing_is_refused():
    with pytest.raises(FileNotFoundError, match=r"links to chapters/gone\.py, which is not there"):
        written("# Chapter\n\nSee [this](../gone.py).\n")
    with pytest.raises(LookupError, match=r"llm\.py has no Gone"):
        written("# Chapter\n\n**[`nanovllm/llm.py`](../../nanovllm/llm.py) · `Gone`**\n")
    with pytest.raises(LookupError, match="names the scene 'Gone'; the lab has none"):
        written("# Chapter\n\nLook. *In the lab: Gone.*\n")
    with pytest.raises(ValueError, match=r"nothing that answers it follows the question 'How many\?'"):
        written("# Chapter\n\n> **What do you expect?** How many?\n\n## Next\n")
    with pytest.raises(ValueError, match=r"ch04_paged_attention/README\.md shows drawn/gone\.svg, and .* no gone\(\)"):
        written("# Chapter\n\n![Nothing](drawn/gone.svg)\n")


def test_what_sphinx_warns_of_is_an_error(tmp_path, monkeypatch):
    """A place that another text does not have, and a page that no other leads to; the error names the text."""
    right = build.chapter_text
    wrong = "\n[x](../ch02_architecture/README.md#gone)\n"
    monkeypatch.setattr(build, "chapter_text", lambda text, chapter, words: right(text, chapter, words) + wrong)
    monkeypatch.setattr(build, "contents", lambda: "")
    monkeypatch.setattr("chapters.site.sources.Sources.pages", lambda sources: [])
    few = [CHAPTERS[1], CHAPTERS[6]]
    names = ("chapters/README.md", *(f"chapters/{chapter.folder.name}/README.md" for chapter in few))
    monkeypatch.setattr(build, "TEXTS", {name: build.TEXTS[name] for name in names})
    monkeypatch.setattr(build, "all_chapters", lambda: few)
    with pytest.raises(ValueError) as error:
        build.build(tmp_path)
    assert re.search(r"ch07_prefix_caching/index\.md:\d+: WARNING: .*gone", str(error.value))
    assert re.search(r"ch07_prefix_caching/index\.md.*isn't included in any toctree", str(error.value))


def test_an_answer_ends_where_the_lesson_goes_on():
    """It is what was printed, and the first paragraph about it; what leads to something else is none."""
    table = "| a | b |\n|---|---|\n| 1 | 2 |\n"
    printed = f"> **What do you expect?** How many?\n\n{table}\n"
    remark, said, lesson = "Look at row 1.", f"It is {'two ' * 30}.", f"And {'more ' * 30}."
    for blocks, shown in (
        ([remark, said, lesson], [remark, said]),
        ([said, "- a point"], [said]),
        (["![Its blocks](drawn/block_table.svg)", remark, said, lesson], [remark, said]),
        (["Now the code:", "```python\n1\n```", said], []),
        (["```text lab\none more\n```", said, lesson], ["one more", said]),
        (["**[`nanovllm/llm.py`](../../nanovllm/llm.py) · `LLM`**", said], []),
        (["## Next", said], []),
    ):
        body = written("# Chapter\n\n" + printed + "\n\n".join(blocks) + "\n")
        answer = answer_of(body)
        hidden = [text for text in ("one more", remark, said, lesson, "a point", "Now the code") if text in answer]
        assert hidden == shown and "<table" in answer, blocks


@for_each_chapter
def test_one_task_at_a_time(chapter, site):
    """Each task of the chapter with its text, and the first is open."""
    text = (site / chapter.folder.name / "exercises.html").read_text("utf-8")
    names = re.findall(r"<summary><code>(\w+)</code>", text)
    assert names == list(EXERCISES[chapter.number])
    assert text.count('<details name="task" open>') == 1 and text.count('<details name="task">') == len(names) - 1
    assert len(
        re.findall(r'<div class="asked"[^>]*><pre class="code head highlight".*?</pre><p>', text, re.DOTALL)
    ) == len(names)


@for_each_chapter
def test_no_answer_hides_a_lesson(chapter, site):
    """Besides what the lab has printed, and what a picture's frames say, an answer has at most 200 words."""
    text = (site / chapter.folder.name / "index.html").read_text("utf-8")
    for piece in text.split('<form class="expect"')[1:]:
        answer = re.sub('<figure class="drawn">.*?</figure>', "", answer_of(piece), flags=re.DOTALL)
        said = re.findall(r"<(?:p|li)>(.*?)</(?:p|li)>", answer, re.DOTALL)
        assert sum(len(re.sub("<.*?>", "", each).split()) for each in said) <= 200


def answer_of(form: str) -> str:
    """The element behind a question's form, to its own end."""
    answer = form.partition('<div class="answer">')[2]
    depth = 1
    for tag in re.finditer(r"<(/?)div\b", answer):
        depth += -1 if tag[1] else 1
        if not depth:
            return answer[: tag.start()]
    raise AssertionError("it does not end")


def test_what_runs_here_is_said_first(site):
    """A reader of the site is led to what runs on it, and need not type commands."""
    first = (site / "index.html").read_text("utf-8").partition('<p class="note">')[2].partition("</p>")[0]
    assert 'lab.html">16</a>' in first and 'ch03_kv_cache/exercises.html">3</a>' in first
    for name, said in (("index", "Here on the site"), ("index.de", "Hier auf der Website")):
        text = (site / "ch01_inference" / f"{name}.html").read_text("utf-8").partition(said)[2]
        lab = name.replace("index", "lab")
        assert text.index(f'href="{lab}.html"') < text.index("<pre")


@pytest.mark.parametrize(("first", "language"), [("index", ""), ("ch01_inference/index.de", ".de")])
def test_the_way_to_the_next_page_stays_in_a_language(first, language, site):
    """Through all pages of each of its chapters, in their order."""
    page, names = site / f"{first}.html", []
    while page.name:
        names.append(page.relative_to(site).as_posix())
        following = re.search('class="next-page" href="(.*?)"', page.read_text("utf-8"))
        page = (page.parent / following[1]).resolve() if following else Path()
    chapters = [chapter for chapter in CHAPTERS if (site / chapter.folder.name / f"index{language}.html").exists()]
    wanted = [f"{chapter.folder.name}/{tab}{language}.html" for chapter in chapters for tab in build.TABS]
    assert [name for name in names if name.startswith("ch")] == wanted
    assert language or len(names) > len(wanted)


@for_each_chapter
def test_a_text_and_its_lab_lead_to_each_other(chapter, site):
    """Every scene is named in the text, most of what is quoted says from which part, and there is a way back."""
    text, lab = ((site / chapter.folder.name / name).read_text("utf-8") for name in ("index.html", "lab.html"))
    for title in Scenes.of(chapter).links:
        shown = html.escape(title)
        assert re.search(rf'In the lab: <a id="scene-\d+" href="lab.html#[^"]+">{re.escape(shown)}</a>', text), (
            f"no text names {title!r}"
        )
        assert re.search(rf'{re.escape(shown)}</a> <a class="to-text" href="index.html#scene-\d+">', lab)
    parts = set(re.findall(r"lab\.html#(part-\d+)", text))
    assert text.count('">from the lab, part') > 3 * text.count(">from the lab<") and len(parts) >= 3
    for part in parts:
        assert re.search(rf'id="{part}"></span>\n<p class="to-text">In the text: <a href="index.html#', lab)


# -- pages in a browser -----------------------------------------------------------------------------------------------


def test_every_page(site, address, phone):
    """Nothing fails, nothing is wider than a phone, every picture is there and its words fit their boxes."""
    pages = {page.relative_to(site).as_posix(): page for page in sorted(site.rglob("*.html"))}
    # Of source files, one of each kind: they are made in the same way, and long lines scroll.
    kinds = {page.name.split(".", 1)[-1]: path for path, page in pages.items() if path.startswith("source/")}
    for path in pages:
        if path.startswith("source/") and path not in kinds.values():
            continue
        phone.goto(f"{address}/{path}")
        width, pictures, clipped, outside = phone.evaluate(
            """() => [document.documentElement.scrollWidth,
                [...document.images].filter(picture => !picture.naturalWidth).map(picture => picture.src),
                [...document.querySelectorAll('.diagram .name')].filter(text => {
                    const boxes = [...text.ownerSVGElement.querySelectorAll('.box')];
                    const { left, right, top, bottom } = text.getBoundingClientRect();
                    return !boxes.map(box => box.getBoundingClientRect()).some(box =>
                        box.left <= left && right <= box.right && box.top <= top && bottom <= box.bottom);
                }).map(text => text.textContent),
                [...document.querySelectorAll('.picture text')].filter(text => text.checkVisibility()).filter(text => {
                    const picture = text.ownerSVGElement.getBoundingClientRect();
                    const { left, right, top, bottom } = text.getBoundingClientRect();
                    return left < picture.left - 4 || right > picture.right + 4 || bottom > picture.bottom + 4;
                }).map(text => text.textContent)]"""
        )
        assert width <= 360, f"{path} is {width} pixels wide on a phone"
        assert not pictures and not clipped and not outside, (path, outside)
        assert phone.title() and (phone.locator("h1").count() == 1 or path == "search.html"), path


def test_how_code_wraps(address, phone):
    """Its first letter stands behind its indentation, and what goes on is farther to the right."""
    phone.goto(f"{address}/ch03_kv_cache/index.html")
    torn, wrapped = phone.evaluate(
        """() => {
            const lines = [...document.querySelectorAll("pre .line")].map((line) => {
                const range = document.createRange();
                range.selectNodeContents(line);
                return [line, [...range.getClientRects()].filter(part => part.width > 1)];
            }).filter(([, parts]) => parts.length);
            const wholes = [...document.querySelectorAll(".whole")].filter(part => part.checkVisibility());
            const goesOn = ([, parts]) => parts.at(-1).top > parts[0].bottom;
            const isTorn = ([line, parts]) => line.querySelector(".in") && parts[1].top > parts[0].bottom;
            const isBack = ([, parts]) => parts.at(-1).left <= parts[0].left;
            const wrong = lines.filter((line) => isTorn(line) || goesOn(line) && isBack(line)).map(([line]) => line);
            wrong.push(...wholes.filter(part => part.getClientRects().length > 1));
            return [wrong.map(part => part.textContent), lines.filter(goesOn).length];
        }"""
    )
    assert not torn and wrapped > 10


def test_a_lab_is_no_wider_than_its_window(address, phone):
    """Nor on a desk; for a phone: test_every_page."""
    for chapter in CHAPTERS:
        phone.goto(f"{address}/{chapter.folder.name}/lab.html")
        for width in (1440, 1100):
            phone.set_viewport_size({"width": width, "height": 900})
            assert phone.evaluate("document.documentElement.scrollWidth") <= width, phone.url


@pytest.mark.parametrize(
    ("pages", "schemes"),
    [
        (PAGES, ("light", "dark")),
        by_night(PAGES, ("dark", "light")),
        *(by_night(MORE, schemes) for schemes in (("light", "dark"), ("dark", "light"))),
    ],
    ids=["some-light-dark", "some-dark-light", "more-light-dark", "more-dark-light"],
)
def test_accessible(pages, schemes, address, phone):
    """Every other page is light; nothing on a page comes from elsewhere."""
    phone.on("request", lambda request: request.url.startswith(address) or phone.problems.append(request.url))
    for number, path in enumerate(pages):
        phone.emulate_media(color_scheme=schemes[number % 2])
        phone.goto(f"{address}/{path}")
        assert_accessible(phone)


def test_what_is_moved(address, phone):
    """A slider shows the picture of its value, by finger and by key; every picture says what it shows."""
    phone.goto(f"{address}/ch06_prefill_decode/index.html")
    moved = phone.locator(".moved").first
    frames, output = moved.locator(".frame:visible"), moved.locator("output")
    before = output.inner_text(), frames.inner_html()
    moved.get_by_role("button", name="on").click()
    after = output.inner_text(), frames.inner_html()
    assert frames.count() == 1 and float(after[0]) > float(before[0]) and before[1] != after[1]
    moved.get_by_role("slider").press("ArrowLeft")
    assert (output.inner_text(), frames.inner_html()) == before
    assert moved.get_by_role("slider").get_attribute("aria-valuetext") == before[0]
    assert frames.get_by_role("img").evaluate("picture => picture.textContent").startswith("Roofline, a step of")


def test_the_contents_go_when_a_section_is_chosen(address, phone):
    phone.goto(f"{address}/ch07_prefix_caching/index.html")
    phone.locator(".toc-overlay-icon:visible").click()
    phone.get_by_role("link", name="Six traps").click()
    phone.wait_for_function("document.querySelector('.toc-drawer').getBoundingClientRect().left >= innerWidth")
    phone.wait_for_function(
        """() => {
          const { top, bottom } = document.querySelector("#six-traps h2").getBoundingClientRect();
          return top > document.querySelector(".mobile-header").offsetHeight && bottom < innerHeight;
        }"""
    )


ROW = """row => {
    const box = element => element.getBoundingClientRect(), cells = [...row.cells].filter(cell => cell.textContent);
    const before = row.previousElementSibling, others = cells.slice(1);
    return box(row).right <= innerWidth && others.every((cell, at) => cell.dataset.name
        && getComputedStyle(cell).textAlign === "left" && box(cell).top >= box(cells[at]).bottom - 1)
        && (!before || Math.abs(box(row).top - box(before).bottom) < 1);
}"""


@pytest.mark.parametrize("page", ["index", "instructor", "ch04_paged_attention/index", "ch07_prefix_caching/index"])
def test_texts_and_diagrams_fit_a_phone(page, address, phone):
    """A table of texts has its cells below each other, without a gap; a heading's link makes no line of its own; code
    and sentences wrap; what a thumb has to hit is large enough, and nothing lies on the first line."""
    phone.goto(f"{address}/{page}.html")
    phone.evaluate("for (const answer of document.querySelectorAll('.answer')) answer.hidden = false")
    shown = phone.locator("table.stack tbody tr").evaluate_all(f"rows => rows.map({ROW})")
    assert shown and all(shown)
    assert phone.locator(".diagram").evaluate_all("all => all.every(each => each.scrollWidth <= each.clientWidth)")
    wide = "all => all.filter(each => each.scrollWidth > each.clientWidth).map(each => each.innerText)"
    assert phone.locator("div.highlight > pre, pre.printed.sentences").evaluate_all(wide) == []
    width = "all => all.map(each => each.getBoundingClientRect().width)"
    assert min(phone.locator(".mobile-header :is(label, button):visible").evaluate_all(width)) >= 40
    phone.evaluate("document.documentElement.classList.add('show-back-to-top')")
    assert phone.locator(".back-to-top").bounding_box()["y"] > phone.viewport_size["height"] / 2
    height = "heads => heads.map(head => head.getBoundingClientRect().height)"
    before = phone.locator("h1, h2, h3").evaluate_all(height)
    phone.evaluate("for (const link of document.querySelectorAll('.headerlink')) link.remove()")
    assert phone.locator("h1, h2, h3").evaluate_all(height) == before


def test_without_script(site, browser):
    """From a folder, with scripts switched off: the text, and the way to the quiz."""
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto((site / "ch07_prefix_caching" / "index.html").as_uri())
    assert tab.get_by_text("The rules were computed once.").is_visible()
    assert tab.get_by_text("python -m chapters quiz 7").last.is_visible()
    assert not tab.locator(".question").first.is_visible()
    assert tab.locator(".moved .frame:visible").count() == 9 and not tab.locator(".mover").first.is_visible()
    tab.emulate_media(media="print")
    assert tab.get_by_text("The rules were computed once.").is_visible()
    assert not tab.locator(".toc-drawer").is_visible() and not tab.locator(".quiz").is_visible()
    context.close()


def test_copy(address, browser):
    """The button lies over the block's corner, and takes the code alone."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab = context.new_page()
    tab.goto(f"{address}/ch06_prefill_decode/index.html")
    block = tab.locator("div.highlight:has(.copybtn)").first
    code, around = block.locator("pre").bounding_box(), block.bounding_box()
    assert code["width"] == around["width"], "no strip is lost to the button"
    block.hover()
    block.locator(".copybtn").click()
    block.locator(".copybtn.success").wait_for()
    copied = tab.evaluate("navigator.clipboard.readText()")
    assert copied and copied in (ROOT / "chapters" / "ch06_prefill_decode" / "README.md").read_text("utf-8")
    context.close()


def test_search(site, address, phone):
    """Without a server, too, which then shows no lines around what it has found."""
    for place in (address, site.as_uri()):
        phone.goto(f"{place}/index.html")
        phone.fill(".sidebar-search", "delta rule")
        phone.keyboard.press("Enter")
        phone.wait_for_selector("#search-results li a")
        found = phone.locator("#search-results li a").all_inner_texts()
        assert any("Memory that does not grow" in title for title in found[:3])
    for term, chapter in (("preemption", "ch05_scheduler"), ("block table", "ch04_paged_attention")):
        phone.goto(f"{address}/search.html?q={term}")
        phone.wait_for_selector("#search-results li:nth-child(3) a")
        first = phone.locator("#search-results li a").evaluate_all("links => links.slice(0, 3).map(link => link.href)")
        assert any(f"/{chapter}/index.html#" in place for place in first), "the section that says what the term means"
    phone.goto("about:blank")  # it fetches no more lines, and says so no more
    phone.problems = [problem for problem in phone.problems if not re.search("file:|[Ff]ailed to fetch", problem)]


def test_a_page_in_another_language(site, address, phone):
    """It says which it is, leads to the English one and back, and its scripts speak it."""
    for name in ("index", "lab", "exercises"):
        phone.goto(f"{address}/ch01_inference/{name}.html")
        assert phone.locator("html").get_attribute("lang") == "en"
        phone.locator(".tabs").get_by_role("link", name="Deutsch", exact=True).click()
        assert phone.url.endswith(f"/{name}.de.html") and phone.locator("html").get_attribute("lang") == "de"
        assert phone.locator("a[hreflang=en]").get_attribute("href") == f"{name}.html"
    phone.goto(f"{address}/ch01_inference/index.de.html")
    question = phone.locator(".question:visible")
    question.locator("input").fill("x")
    question.get_by_role("button", name="Antworten").click()
    assert question.locator(".verdict").inner_text() == "Gib eine Zahl ein."
    assert question.locator("form").get_attribute("data-groups") == ",."
    question.locator("input").fill("6")
    question.get_by_role("button", name="Antworten").click()
    assert question.locator(".verdict").inner_text().startswith("Nein. Ein Logit bewertet einen Kandidaten")
    expect = phone.locator("form.expect").first
    expect.locator("input").fill("64")
    expect.get_by_role("button", name="Antwort zeigen").click()
    assert expect.locator(".expected").inner_text() == "Du hast erwartet: 64"


# -- quizzes ----------------------------------------------------------------------------------------------------------


def plain(markdown: str) -> str:
    return " ".join(re.sub(r"[`*]", "", markdown).split())


def answers_of(question: dict, number: int) -> list[tuple[str, bool, str]]:
    """(what is clicked or typed, is it right, what the terminal says of it) for every possible answer."""
    said = quiz.verdicts(question, number)
    if "answer" in question:
        return [(f"{float(given or 123456789):,}", *what) for given, what in said.items()]
    return [(letter, *what) for letter, what in said.items() if letter]


ANSWER = """rounds => rounds.map(answers => [answers.map(texts => {
    const panel = [...document.querySelectorAll(".question")].find(each => each.checkVisibility());
    const form = panel.querySelector("form"), verdict = panel.querySelector(".verdict");
    const said = texts.filter(() => panel.querySelector(".next").hidden).map(text => {
        if (form) {
            form.elements.number.value = text;
            form.requestSubmit();
        } else {
            panel.querySelectorAll(".option")["abcdef".indexOf(text)].click();
        }
        return verdict.innerText;
    });
    panel.querySelector(".next").click();
    return said;
}), document.querySelector(".score p").innerText, document.querySelector(".again").click()])"""


def two_of(answers: list[tuple[str, bool, str]], turn: int) -> list[tuple[str, bool, str]]:
    """An answer, and another one if it is wrong."""
    first, second = (answers[(turn + i) % len(answers)] for i in range(2))
    return [first] if first[1] else [first, second]


def said_of(tries: list[tuple[str, bool, str]], solution: str) -> list[str]:
    """What the terminal says after each of them."""
    right, wrong = "Right. {}".format, "No. {} {}".format
    after = [ENGLISH("quiz.again"), solution]
    said = [
        right(what) if is_right else wrong(what, then) for (_, is_right, what), then in zip(tries, after, strict=False)
    ]
    return [plain(text) for text in said]


def test_quizzes(site, phone):
    """Round after round, with other answers to every question, two if the first is wrong: the page says what the
    terminal says."""
    for chapter in CHAPTERS:
        phone.goto((site / chapter.folder.name / "index.html").as_uri())
        questions = [answers_of(question, number) for number, question in enumerate(quiz.load(chapter), start=1)]
        solutions = [quiz.solution(question, number) for number, question in enumerate(quiz.load(chapter), start=1)]
        rounds = [[two_of(answers, turn) for answers in questions] for turn in range(max(map(len, questions)))]
        shown = phone.evaluate(ANSWER, [[[text for text, _, _ in tries] for tries in answers] for answers in rounds])
        for answers, (comments, score, _) in zip(rounds, shown, strict=True):
            expected = [said_of(*asked) for asked in zip(answers, solutions, strict=True)]
            assert [[" ".join(text.split()) for text in texts] for texts in comments] == expected
            assert score == f"{sum(tries[-1][1] for tries in answers)} of {len(questions)}"


def test_no_answer_is_read_by_accident(site):
    """What is right, and what is said of an answer, is not in the page's text (chapters/sealed.py)."""
    for chapter in CHAPTERS:
        page = (site / chapter.folder.name / "index.html").read_text("utf-8").partition('<section class="quiz"')[2]
        assert page
        for number, question in enumerate(quiz.load(chapter), start=1):
            said = [quiz.solution(question, number), *(text for _, text in quiz.verdicts(question, number).values())]
            assert not [text for text in said if text and inline_html(text) in page]


def test_quiz_by_finger_and_keyboard(address, phone):
    phone.goto(f"{address}/ch07_prefix_caching/index.html#quiz")
    read = "typed => ['en', 'de'].map(language => numberIn(typed, language === 'en' ? ',' : ',.'))"
    for typed, numbers in NUMBERS.items():
        found = [number if math.isfinite(number) else None for number in phone.evaluate(read, typed)]
        assert found == [*numbers], typed
    questions = quiz.load(CHAPTERS[6])
    for number, question in enumerate(questions, start=1):
        panel = phone.locator(".question:visible")
        assert panel.locator(".count").inner_text() == f"Question {number} of {len(questions)}"
        right = next(text for text, is_right, _ in answers_of(question, number) if is_right)
        if number == 4:
            phone.reload()  # what was answered is kept
            phone.evaluate("document.querySelector('.question:not([hidden]) .ask').focus()")
        if "answer" in question:
            panel.locator("input").press_sequentially("what?\n")
            assert panel.locator(".verdict").inner_text() == "Type a number."
            panel.locator("input").fill(right)
            phone.keyboard.press("Enter")
        else:
            panel.locator(".option").nth("abcdef".index(right)).click()
            assert panel.locator(".option.good b").all_inner_texts() == [right]
        assert panel.locator(".option:enabled, input:enabled").count() == 0
        phone.wait_for_function(
            "document.querySelector('.question:not([hidden]) .next').getBoundingClientRect().bottom <= innerHeight"
        )
        phone.keyboard.press("Enter")  # the button "Next question" has the focus
    phone.reload()
    assert phone.locator(".score p").inner_text() == f"{len(questions)} of {len(questions)}"
    phone.click(".again")
    wrong = phone.locator(".question:visible .option, .question:visible form")
    assert phone.locator(".question:visible .count").inner_text().startswith("Question 1 of") and wrong.count()
    phone.reload()
    assert phone.locator(".question:visible .count").inner_text().startswith("Question 1 of")


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_what_a_reader_expects_is_kept_and_shown(address, phone):
    """An answer is covered until something is typed, or a link leads into it."""
    phone.goto(f"{address}/ch16_fixed_memory/index.html")
    asked = phone.locator("form.expect").count()
    assert asked >= 3 and phone.locator(".answer:visible").count() == 0
    phone.fill("form.expect input >> nth=0", "less, <b>I think</b>")
    phone.keyboard.press("Enter")
    assert phone.inner_text(".expected >> nth=0") == "You expected: less, <b>I think</b>"
    assert phone.locator(".answer:visible").count() == 1
    phone.goto(f"{address}/ch16_fixed_memory/index.html#scene-1")
    phone.reload()
    assert phone.inner_text(".expected >> nth=0") == "You expected: less, <b>I think</b>"
    assert phone.locator(".answer:visible").count() == 2 and phone.locator("#scene-1").is_visible()
    assert_accessible(phone)


# -- the command ------------------------------------------------------------------------------------------------------


def test_command(tmp_path, monkeypatch, capsys):
    done = []
    monkeypatch.setattr("chapters.site.build.build", lambda *options: done.append(options))
    monkeypatch.setattr("chapters.site.server.serve", lambda server: done.append(server.server_address))
    with server_at("127.0.0.1", 0, tmp_path) as other:
        taken = other.server_port
        for port, said in ((taken, "in use"), (99_999, "must be 0-65535")):
            assert main(["site", "--out", str(tmp_path), "--serve", "--port", str(port)]) == 2
            assert said in (error := capsys.readouterr().err) and f"--port {port}" in error
    assert main(["site", "--draw", "--out", str(tmp_path), "--serve"]) == 2
    assert "--draw takes no --out and no --serve" in capsys.readouterr().err
    assert main(["site", "--out", str(tmp_path), "--host", "0.0.0.0", "--port", "9000"]) == 2
    assert "without --serve takes no --host and no --port" in capsys.readouterr().err
    assert done == [], "nothing is built before"
    to_all = ["--serve", "--host", "0.0.0.0", "--port", str(taken)]
    assert main(["site", "--out", str(tmp_path), "--offline", *to_all]) == 0
    assert done == [(tmp_path, True, False), ("0.0.0.0", taken)] and "index.html" in capsys.readouterr().out


def test_a_folder_that_is_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("chapters.site.build.write_texts", lambda *given: pytest.fail("pages were made"))
    (tmp_path / "site").write_text("")
    assert main(["site", "--out", str(tmp_path / "site")]) == 2
    assert "File exists" in capsys.readouterr().err
