"""The site as a reader finds it: every page in a real browser, every link, every question of every quiz."""

import html
import json
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
from chapters.recording import Recording
from chapters.sheet import MEASURED, Sheet, read
from chapters.site import diagrams, formulas, tasks
from chapters.site.runtime import MissingRuntime
from chapters.site.scenes import Scenes
from chapters.site.server import served
from chapters.site.sources import Sources
from chapters.site.stories import story_of
from chapters.site.tables import quoted
from chapters.site.text import Place, inline_html, render_text
from chapters.words import ENGLISH
from tests.course.course_text import CHAPTERS, ROOT, for_each_chapter
from tests.site_browser import assert_accessible, chromium, go_offline, wait_until_kept, wait_until_none

PAGES = ["readme.html", "one_request.html", "source/nanovllm/core/block_manager.py.html", "source/nanovllm/index.html"]
PAGES += ["from_nano_vllm.html", "add_a_wing.html"]
PAGES += [f"ch01_inference/{name}.de.html" for name in ("index", "lab")]
PAGES += [f"{chapter.folder.name}/index.html" for chapter in CHAPTERS[1::6]]  # a page or two of each kind
PAGES += [
    f"{CHAPTERS[5].folder.name}/{name}.html" for name in ("lab", "exercises")
]  # those that run: test_site_labs.py
COLOURS = ["index.html", "search.html?q=block", "ch04_paged_attention/index.html", "ch06_prefill_decode/lab.html"]
COLOURS += ["ch01_inference/exercises.html", "source/nanovllm/prompts.py.html"]
TAGS = {"part": "h2", "say": "p", "print": "pre", "table": "table", "histogram": "figure", "levels": "figure"}
BUILD = """
import sys
sys.modules.update(torch=None, transformers=None, safetensors=None, marimo=None)
from chapters.__main__ import main
from chapters.recording import Recording
from chapters.sheet import MEASURED, Sheet, read
from chapters.site import diagrams
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
        self.feed(page.read_text("utf-8"))

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
        assert len(set(found.ids)) == len(found.ids), f"{page}: an id twice"
        for link in found.links + [part for part in found.parts if not part.startswith("data:")]:
            url = urlsplit(link)
            if url.scheme:
                assert url.scheme == "https" and link in found.links, f"{page} loads {link}"
                continue
            target = (page.parent / url.path).resolve() if url.path else page
            assert target.is_file() and target.is_relative_to(site), f"{page}: {link} is not there"
            state = target.name == "lab.html" and not re.match("part-|story$|content$", url.fragment)
            if url.fragment and not state:  # of a lab that runs in the page
                assert unquote(url.fragment) in pages[target].ids, f"{page}: no place {link}"


def test_links_lead_to_the_line(site):
    """Those of one request's life, and those above the quotes."""
    checked = 0
    for page in ("one_request.html", *(f"{chapter.folder.name}/index.html" for chapter in CHAPTERS)):
        text = (site / page).read_text("utf-8")
        links = re.findall(r'<a href="([^"#]+)#L(\d+)"><code>([\w.]+)</code></a>', text)
        links += re.findall(r'<strong><a href="([^"#]+)#L(\d+)"><code>[^<]+</code></a> · <code>([\w.]+)</code>', text)
        for target, line, symbol in links:
            source = ROOT / (site / page).parent.joinpath(target).resolve().relative_to(site / "source")
            lines = source.with_suffix("").read_text("utf-8").splitlines()[int(line) - 1 :][:4]  # decorators first
            assert symbol.split(".")[-1] in "\n".join(lines), f"{target}#L{line} is not {symbol}"
            checked += 1
    assert checked > 100


def test_a_link_to_nothing_is_refused():
    place = Place("chapters/ch04_paged_attention/README.md", "ch04_paged_attention/index.html", Sources())
    with pytest.raises(FileNotFoundError, match=r"links to chapters/gone\.py, which is not there"):
        render_text("# Chapter\n\nSee [this](../gone.py).\n", place)
    with pytest.raises(LookupError, match=r"llm\.py has no Gone"):
        render_text("# Chapter\n\n**[`nanovllm/llm.py`](../../nanovllm/llm.py) · `Gone`**\n", place)
    with pytest.raises(LookupError, match="names the scene 'Gone'; the lab has none"):
        render_text("# Chapter\n\nLook. *In the lab: Gone.*\n", place)
    with pytest.raises(ValueError, match=r"nothing that answers it follows the question 'How many\?'"):
        render_text("# Chapter\n\n> **What do you expect?** How many?\n\n## Next\n", place)


def test_an_answer_ends_where_the_lesson_goes_on():
    """It is what was printed, and the first paragraph about it; what leads to something else is none."""
    place = Place("chapters/ch04_paged_attention/README.md", "ch04_paged_attention/index.html", Sources())
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
        place.names.clear()
        body = render_text("# Chapter\n\n" + printed + "\n\n".join(blocks) + "\n", place).body
        answer = answer_of(body)
        hidden = [text for text in ("one more", remark, said, lesson, "a point", "Now the code") if text in answer]
        assert hidden == shown and "<table" in answer, blocks


def shape_of(formula: str) -> str:
    return re.sub(r"<mspace[^>]*>|</?(?:math|mrow|mi|mn|mo|mtext)\b[^>]*>", "", formulas.math(formula))


def test_formulas():
    """Fractions, powers and roots are set; parentheses that they make needless are gone; words stay words."""
    assert shape_of("λ × E[S²] / (2 × (1 - ρ))") == "λ·<mfrac>E[<msup>S2</msup>]2·(1−ρ)</mfrac>"
    assert shape_of("(1 - a^(k+1)) / (1 - a)") == "<mfrac>1−<msup>ak+1</msup>1−a</mfrac>"
    assert shape_of("128 * (1 - (1 - 8/128)^n)") == "128·(1−<msup>(1−<mfrac>8128</mfrac>)n</msup>)"
    assert "<mtext>a</mtext>" in formulas.math("tokens a second = a * 2") and "<mi>a</mi>" in formulas.math("a * 2")
    said = formulas.in_sentence("a step / √12 & a^j, (1 - b)^n")
    assert said.count("<math>") == 3 and "step / <math>" in said and "&amp;" in said
    assert formulas.split("a step    τ = s      seconds; more") == ("a step", "τ = s", "seconds; more")
    assert formulas.split("a   -   b    +    c") == ("", "a - b + c", "")


@for_each_chapter
def test_every_formula_is_read_to_its_end(chapter):
    """No sign is lost on the way."""
    signs = re.compile(r"[\s()^/*×·−-]")
    for block in re.findall(r"```text formula\n(.*?)```", (chapter.folder / "README.md").read_text("utf-8"), re.DOTALL):
        drawn = html.unescape(re.sub("<[^>]*>", "", formulas.figure(block)))
        assert signs.sub("", drawn) == signs.sub("", block).replace("²", "2")


def test_what_an_exercise_asks_for():
    """A docstring in the page's type: paragraphs, lists, names with what they mean, and code."""
    text = "Give x_y blocks.\nNow.\n\nReturn:\n- one,\n  or more\n- `two`\n\n"
    text += "    k_cache  of keys <b>\n             and more\n    v        else"
    assert tasks.html_of(text) == (
        "<p>Give <code>x_y</code> blocks. Now.</p><p>Return:</p><ul><li>one, or more</li><li><code>two</code></li></ul>"
        "<dl><dt><code>k_cache</code></dt><dd>of keys &lt;b&gt; and more</dd><dt><code>v</code></dt><dd>else</dd></dl>"
    )
    assert tasks.html_of("    a = 1\n      b").startswith('<pre class="code"')


@for_each_chapter
def test_one_task_at_a_time(chapter, site):
    """Each task of the chapter with its text, and the first is open."""
    text = (site / chapter.folder.name / "exercises.html").read_text("utf-8")
    names = re.findall(r"<summary><h2><code>(\w+)</code>", text)
    assert names == list(EXERCISES[chapter.number])
    assert text.count('<details name="task" open>') == 1 and text.count('<details name="task">') == len(names) - 1
    assert len(re.findall(r'<div class="asked"[^>]*><pre class="code head".*?</pre><p>', text, re.DOTALL)) == len(names)


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


@for_each_chapter
def test_a_text_and_its_lab_lead_to_each_other(chapter, site):
    """Every scene is named in the text, most of what is quoted says from which part, and there is a way back."""
    text, lab = ((site / chapter.folder.name / name).read_text("utf-8") for name in ("index.html", "lab.html"))
    for title in Scenes.of(chapter).links:
        shown = html.escape(title)
        assert re.search(rf'In the lab: <a href="lab.html#[^"]+">{re.escape(shown)}</a>', text), (
            f"no text names {title!r}"
        )
        assert re.search(rf'{re.escape(shown)}</a> <a class="to-text" href="index.html#scene-\d+">', lab)
    parts = set(re.findall(r"lab\.html#(part-\d+)", text))
    assert text.count('">from the lab, part') > 3 * text.count(">from the lab<") and len(parts) >= 3
    for part in parts:
        assert re.search(rf'<h2 id="{part}">.*</h2>\n<p class="to-text">In the text: <a href="index.html#', lab)


def test_diagrams_are_drawn():
    assert set(diagrams.DRAWN.glob("*.svg")) == diagrams.wanted().keys(), "python -m chapters site --draw"
    assert "<pre" in diagrams.figure("flowchart LR\n    A --> B\n", 1), "until then, the text is shown"


@pytest.mark.ci
def test_drawing(tmp_path, monkeypatch):
    """Anew, with the same words; letters are not of the same width everywhere."""
    with chromium():  # skips where there is none; what draws starts one of its own
        pass
    before = {picture.name: words(picture) for picture in diagrams.wanted()}
    monkeypatch.setattr(diagrams, "DRAWN", tmp_path)
    (tmp_path / "of a text that is gone.svg").touch()
    try:
        diagrams.draw_all()
    except MissingRuntime as error:
        pytest.skip(str(error))
    assert {picture.name: words(picture) for picture in tmp_path.iterdir()} == before


def words(picture: Path) -> set[str]:
    drawing = picture.read_text("utf-8")
    return {*re.findall('aria-label="Diagram. .*?"', drawing), *" ".join(re.findall(">(.*)</text>", drawing)).split()}


@for_each_chapter
def test_stories(chapter):
    """All that was told is there, in its order; tables are tables, and what was measured is marked."""
    told, text = Recording(chapter.folder).told, story_of(chapter, Scenes())
    kinds = [kind for kind, _ in told]
    assert len(text.headings) == kinds.count("part") >= 3
    assert re.findall("<(h2|p|pre|table|figure)[ >]", text.body)[1:] == [TAGS[kind] for kind in kinds]
    pieces = [what["rows"] if kind == "table" else what.split("\n") for kind, what in told if TAGS[kind] != "figure"]
    num_measured = sum(MEASURED in str(piece) for each in pieces for piece in each)
    assert text.body.count('class="measured"') - 1 == num_measured
    assert num_measured or chapter.number in (4, 5)
    assert text.body.count("<tr") == sum(len(what["rows"]) + 1 for kind, what in told if kind == "table")


def test_a_quote_is_drawn_as_the_lab_draws_it():
    """A table without headings gets the lab's; a paragraph is one again; a picture stays as it was printed."""
    rows = [["1", "a", "2.5", MEASURED], ["2", "b", "9", MEASURED]]
    table = {"title": "", "columns": ["step", "", "ms", ""], "rows": rows}
    told = [("say", f"The first one took 4 ms. {MEASURED}"), ("print", "A  +0 x  ·1 y"), ("table", table)]
    drawn = quoted(f" 1 │ a │ 3.1 │ {MEASURED}\n\nThe first one took\n5 ms. {MEASURED}\n\nA  +0 x\n", told)
    assert re.findall("<th .*?>(.*?)</th>", drawn) == ["step", "ms", "1"] and MEASURED not in re.sub("<p.*", "", drawn)
    assert re.findall("<tr(.*?)>", drawn) == ["", ' class="measured"']
    assert f'<p class="measured">The first one took 5 ms. {MEASURED}</p>' in drawn and ">A  +0 x</pre>" in drawn
    assert read(" a ┃ b\n━━━╇━━━\n 1 │ 2\n") == Sheet(["a", "b"], [["1", "2"]])
    assert read("a\n├── b │ c\n") is read("one line") is read(" 1 │ 2\n 1 │ 2 │ 3\n") is None


# -- pages in a browser -----------------------------------------------------------------------------------------------


def test_the_first_page(site, phone):
    """What it is, one thing to do next, and how far one is; notes for teachers are on another page."""
    phone.goto((site / "index.html").as_uri())
    assert phone.locator(".primary").all_inner_texts() == ["Start with chapter 1"]
    assert (
        phone.locator(".hero img").evaluate("picture => picture.naturalWidth") and phone.locator(".lede").is_visible()
    )
    assert not phone.locator(".progress").is_visible() and phone.locator("#grading").count() == 0
    phone.evaluate("kept.set('read-1', 'yes')")
    phone.reload()
    assert phone.inner_text(".progress span") == f"1 of {len(CHAPTERS)} chapters read"
    assert phone.inner_text(".primary") == "Continue with chapter 2"
    phone.click(".primary")
    assert phone.url.endswith("ch02_architecture/index.html")
    phone.goto((site / "index.html").as_uri())
    phone.click("text=For teachers")
    assert phone.url.endswith("running.html#for-teachers") and phone.locator("#grading").count() == 1


def test_text_tables_code_and_pictures_end_at_one_edge(site, browser):
    """And the button that copies is beside the code."""
    tab = browser.new_page(viewport={"width": 1280, "height": 800})
    tab.goto((site / "ch12_fewer_bits" / "index.html").as_uri())
    edges = tab.evaluate(
        """() => [...document.querySelectorAll("#content > :is(p, figure, .scroll, .copied, .diagram, form)")]
            .filter(each => each.checkVisibility()).map(each => Math.round(each.getBoundingClientRect().right))"""
    )
    covered = tab.evaluate(
        """() => [...document.querySelectorAll(".copied")].filter(each => {
            const [code, button] = [...each.children].map(child => child.getBoundingClientRect());
            return button.left < code.right - 1; }).length"""
    )
    tab.close()
    assert len(edges) > 50 and len(set(edges)) == 1 and not covered


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
        assert phone.title() and phone.locator("h1").count() == 1, path


def test_accessible(address, phone):
    """A page or two of each kind; of colours, light and dark."""
    no_colours, colours = {"rules": {"color-contrast": {"enabled": False}}}, {"runOnly": ["color-contrast"]}
    checks = [(path, "light", no_colours) for path in PAGES]
    checks += [(path, scheme, colours) for path in COLOURS for scheme in ("light", "dark")]
    for path, scheme, options in checks:
        phone.emulate_media(color_scheme=scheme)
        if not phone.url.endswith(f"/where/{path}"):
            phone.goto(f"{address}/{path}")
        assert_accessible(phone, ("minor", "moderate", "serious", "critical"), **options)


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
    assert not tab.locator("nav.toc").is_visible() and not tab.locator(".quiz").is_visible()
    context.close()


def test_copy_and_contents(address, browser):
    context = browser.new_context(viewport={"width": 1280, "height": 800}, permissions=["clipboard-write"])
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab = context.new_page()
    tab.goto(f"{address}/ch06_prefill_decode/index.html")
    tab.locator(".copy").first.click()
    tab.get_by_role("button", name="Copied").wait_for()
    copied = tab.evaluate("navigator.clipboard.readText()")
    assert copied in (ROOT / "chapters" / "ch06_prefill_decode" / "README.md").read_text("utf-8")
    tab.locator("nav.toc").get_by_text("Two stopwatches").click()
    assert tab.url.endswith("#two-stopwatches")
    tab.locator("nav.toc a.here", has_text="Two stopwatches").wait_for()
    context.close()


def test_a_page_in_another_language(site, address, phone):
    """It says which it is, leads to the English one and back, and its scripts speak it."""
    for name in ("index", "lab", "exercises"):
        phone.goto(f"{address}/ch01_inference/{name}.html")
        assert phone.locator("html").get_attribute("lang") == "en"
        phone.get_by_role("link", name="Deutsch", exact=True).click()
        assert phone.url.endswith(f"/{name}.de.html") and phone.locator("html").get_attribute("lang") == "de"
        assert phone.locator("link[hreflang=en]").get_attribute("href") == f"{name}.html"
    phone.goto(f"{address}/ch01_inference/index.de.html")
    question = phone.locator(".question:visible")
    question.locator("input").fill("x")
    question.get_by_role("button", name="Antworten").click()
    assert question.locator(".verdict").inner_text() == "Gib eine Zahl ein."
    question.locator("input").fill("6")
    question.get_by_role("button", name="Antworten").click()
    assert question.locator(".verdict").inner_text().startswith("Nein. Ein Logit bewertet einen Kandidaten")
    expect = phone.locator("form.expect").first
    expect.locator("input").fill("64")
    expect.get_by_role("button", name="Antwort zeigen").click()
    assert expect.locator(".expected").inner_text() == "Du hast erwartet: 64"
    assert phone.get_by_role("link", name="2 Architecture (englisch)").first.is_visible()


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
    questions = quiz.load(CHAPTERS[6])
    for number, question in enumerate(questions, start=1):
        panel = phone.locator(".question:visible")
        assert panel.locator(".count").inner_text() == f"Question {number} of {len(questions)}"
        right = next(text for text, is_right, _ in answers_of(question, number) if is_right)
        if "answer" in question:
            panel.locator("input").press_sequentially("what?\n")
            assert panel.locator(".verdict").inner_text() == "Type a number."
            panel.locator("input").fill(right)
            phone.keyboard.press("Enter")
        else:
            panel.locator(".option").nth("abcdef".index(right)).click()
            assert panel.locator(".option.good b").all_inner_texts() == [right]
        assert panel.locator(".option:enabled, input:enabled").count() == 0
        phone.keyboard.press("Enter")  # the button "Next question" has the focus
    assert phone.locator(".score p").inner_text() == f"{len(questions)} of {len(questions)}"


# -- without a network ------------------------------------------------------------------------------------------------


def test_a_page_that_was_opened_needs_no_network(site, address, phone):
    """Reloaded, with its quiz. Another build takes the old one's place."""
    phone.goto(f"{address}/ch07_prefix_caching/index.html")
    go_offline(phone)
    phone.reload()
    assert phone.get_by_text("The rules were computed once.").is_visible()
    phone.locator(".question:visible").locator(".option, button").first.click()
    assert phone.locator(".question:visible .verdict").inner_text()
    phone.goto(f"{address}/ch07_prefix_caching/")
    assert phone.title() == "Chapter 7: Prefix caching"
    phone.context.set_offline(False)

    worker = site / "service-worker.js"
    [version] = re.findall('VERSION = "([0-9a-f]{16})"', worker.read_text("utf-8"))
    worker.write_text(worker.read_text("utf-8").replace(version, "another"), "utf-8")
    phone.goto(f"{address}/index.html")
    wait_until_none(phone, "caches.keys().then(names => names.filter(name => !name.endsWith(' another')))")
    go_offline(phone)
    phone.reload()
    assert phone.title() and phone.locator("h1").is_visible()


def test_a_page_that_was_never_opened_says_so(address, phone):
    """In its language; from there one comes to the contents, which are kept. With a network again, it is there."""
    phone.goto(f"{address}/ch07_prefix_caching/index.html")
    go_offline(phone)
    for path, language, why in (
        ("ch01_inference/index.de.html", "de", "Es gibt kein Netz"),
        ("ch06_prefill_decode/", "en", "has not been opened in this browser yet"),
    ):
        assert phone.goto(f"{address}/{path}").status == 503
        assert phone.locator("html").get_attribute("lang") == language and why in phone.inner_text("main")
        assert_accessible(phone)
    assert any("503" in problem for problem in phone.problems)
    phone.problems.clear()
    phone.get_by_role("link").click()
    assert phone.url == f"{address}/index.html" and phone.locator(".keeping").is_visible(), "with its scripts"
    assert phone.evaluate("[...document.styleSheets].every(({ cssRules }) => cssRules.length)")
    phone.context.set_offline(False)
    phone.go_back()
    phone.reload()
    assert phone.title() == "Chapter 6: Prefill and decode"


def test_a_page_that_is_left_at_once_is_kept(address, phone):
    """It does not wait for its worker to begin."""
    phone.add_init_script(
        """Object.defineProperty(ServiceWorkerContainer.prototype, "ready", { get: () => new Promise(() => {}) });"""
    )
    phone.goto(f"{address}/ch07_prefix_caching/index.html")
    wait_until_kept(phone)


# -- what is kept, and the search -------------------------------------------------------------------------------------


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


def test_progress_is_kept_and_goes_to_another_browser(address, phone, browser, tmp_path):
    phone.goto(f"{address}/ch07_prefix_caching/index.html")
    phone.check(".read input")
    phone.evaluate(
        ANSWER,
        [[[a[0] for a in answers_of(*each)[:2]] for each in zip(quiz.load(CHAPTERS[6]), range(1, 99), strict=False)]],
    )
    phone.reload()
    assert phone.is_checked(".read input") and "last time: " in phone.inner_text(".question:visible .count")
    phone.evaluate("kept.set('solved-7', '[\"take_fresh\"]'), kept.set('solved-8', '17'), kept.set('quiz-8', '{')")
    phone.goto(f"{address}/index.html")
    [done] = phone.locator(".done").all_inner_texts()
    assert re.fullmatch(r"read · quiz \d+ of \d+ · exercises 1 of 5", done)
    with phone.expect_download() as download:
        phone.click(".export")
    file = tmp_path / "kept.json"
    file.write_bytes(Path(download.value.path()).read_bytes())

    other = browser.new_page()
    other.goto(f"{address}/index.html")
    assert other.locator(".done").count() == 0
    for wrong, said in (
        ("nothing", "no JSON"),
        ("[]", "nothing in this file"),
        (json.dumps({"course": "nanovllm", "kept": {"read-1": "yes", "other": "x"}}), "another kind: other"),
    ):
        other.set_input_files(".keeping input", {"name": "x", "mimeType": "", "buffer": wrong.encode()})
        other.get_by_text(said).wait_for()
    assert other.evaluate("localStorage.length") == 0
    other.set_input_files(".keeping input", file)
    other.get_by_text(done).wait_for()
    other.close()


def test_search(site, phone):
    """Without a server, by any words: the section about them comes first."""
    phone.goto((site / "index.html").as_uri())
    phone.fill("header input", "copy on WRITE")
    phone.keyboard.press("Enter")
    phone.wait_for_selector(".found a")
    assert phone.inner_text(".found a >> nth=0") == "Why nothing is ever copied"
    assert "write" in phone.locator(".found mark").all_inner_texts()
    for words, first in (("delta rule", "The delta rule"), ("num_computed", "Two calls around prefill")):
        phone.fill("main input", words)
        assert phone.inner_text(".found a >> nth=0") == first
    for nothing in ("xyzzy", "(c++ [", " "):
        phone.fill("main input", nothing)
        assert phone.locator(".found li").count() == 0
    phone.fill("main input", "salt")
    phone.click(".found a >> nth=0")
    assert phone.url.endswith("ch07_prefix_caching/index.html#salts-and-a-stopwatch")


# -- the command ------------------------------------------------------------------------------------------------------


def test_command(tmp_path, monkeypatch, capsys):
    done = []
    monkeypatch.setattr("chapters.site.build.build", lambda *options: done.append(options))
    monkeypatch.setattr("chapters.site.server.serve", lambda *options: done.append(options))
    assert main(["site", "--out", str(tmp_path), "--offline", "--serve", "--port", "8123"]) == 0
    assert done == [(tmp_path, True, False), (tmp_path, 8123)] and "index.html" in capsys.readouterr().out
