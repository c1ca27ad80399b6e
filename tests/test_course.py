"""The course cannot drift from the engine: quotes, code, numbers, labs, quizzes, exercises and their grading."""

import ast
import asyncio
import contextlib
import importlib
import inspect
import io
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from rich.console import Console
from textual.widgets import Button, Input, Static

from chapters import quiz
from chapters.__main__ import main
from chapters.ch07_prefix_caching import simulator
from chapters.course import TITLES, Progress, all_chapters, find_chapter
from chapters.grading import Bench, Task, Wrong, grade, grade_all
from chapters.patching import replaced
from chapters.story import WIDTH
from nanovllm import LLM, SamplingParams

ROOT = Path(__file__).parent.parent
CHAPTERS = all_chapters()
PAGES = [f"chapters/{chapter.folder.name}/README.md" for chapter in CHAPTERS]
PLAYED = (3, 4, 5, 7, 8)  # the labs that are apps
FENCE = re.compile(
    r"(?:^\*\*\[`(?P<path>[\w/.]+)`\]\(\.\./\.\./(?P<link>[\w/.]+)\) · `(?P<symbol>[\w.]+)`\*\*\n\n)?"
    r"^```(?P<info>[^\n]*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)

for_each_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.folder.name[:4])


@pytest.fixture(autouse=True)
def own_data_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def text_of(chapter) -> str:
    return (chapter.folder / "README.md").read_text("utf-8")


def blocks(chapter) -> list[re.Match]:
    return list(FENCE.finditer(text_of(chapter)))


# -- the text ---------------------------------------------------------------------------------------------------------


def test_the_chapters_there_are():
    assert [chapter.number for chapter in CHAPTERS] == list(TITLES)


@for_each_chapter
def test_shape(chapter):
    text = text_of(chapter)
    assert text.startswith(f"# Chapter {chapter.number}: {chapter.title}\n")
    assert "## Now you" in text and len(text.split()) > 2000
    for name in ("lab", "quiz", "check"):
        assert f"python -m chapters {name} {chapter.number}" in text
    assert "nanovllm/" in text and "arXiv" in text


@pytest.mark.parametrize("page", ["README.md", "chapters/README.md", "chapters/one_request.md", *PAGES])
def test_links(page):
    prose = FENCE.sub("", (ROOT / page).read_text("utf-8"))
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", prose) + re.findall(r"^\[\d+\]: (.*)$", prose, re.MULTILINE)
    for target in targets:
        if not target.startswith("http"):
            assert (ROOT / page).parent.joinpath(target).exists(), f"{target} is not there"


def node_of(path: str, symbol: str) -> ast.stmt:
    """The definition of a class, function, method or module-level constant."""
    body: list = ast.parse((ROOT / path).read_text("utf-8")).body
    for name in symbol.split("."):
        for node in body:
            targets = getattr(node, "targets", [getattr(node, "target", None)])  # of an assignment
            if name in [getattr(node, "name", None), *(getattr(target, "id", None) for target in targets)]:
                found, body = node, getattr(node, "body", [])
                break
        else:
            raise AssertionError(f"{path} has no {symbol}")
    return found


def first_line(node: ast.stmt) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])


def source_of(path: str, symbol: str) -> str:
    """The dedented source of what node_of() finds, or of a function in C."""
    if path.endswith(".c"):
        text = (ROOT / path).read_text("utf-8")
        function = re.search(rf"^\w[^\n]*\b{symbol}\(.*?^\}}", text, re.MULTILINE | re.DOTALL)
        assert function, f"{path} has no {symbol}"
        return function[0]
    node, lines = node_of(path, symbol), (ROOT / path).read_text("utf-8").splitlines()
    return textwrap.dedent("\n".join(lines[first_line(node) - 1 : node.end_lineno]))


def assert_quoted(quote: str, source: str) -> None:
    """A line "..." stands for lines left out; each stretch between is in the source, in order."""
    lines, at = [line.rstrip() for line in source.splitlines()], 0
    stretches: list[list[str]] = [[]]
    for line in textwrap.dedent(quote).splitlines():
        if line.strip() == "...":
            stretches.append([])
        else:
            stretches[-1].append(line.rstrip())
    for stretch in stretches:
        while stretch and not stretch[0]:
            stretch.pop(0)
        while stretch and not stretch[-1]:
            stretch.pop()
        if not stretch:
            continue
        size = len(stretch)
        found = next((i for i in range(at, len(lines) - size + 1) if lines[i : i + size] == stretch), None)
        assert found is not None, "not in the source:\n" + "\n".join(stretch)
        at = found + size


@for_each_chapter
def test_quotes(chapter):
    quotes = [block for block in blocks(chapter) if block["path"]]
    assert len(quotes) >= 3
    for block in quotes:
        assert block["path"] == block["link"] and block["path"].startswith(("nanovllm/", "examples/"))
        assert_quoted(block["text"], source_of(block["path"], block["symbol"]))


def test_a_drifted_quote_is_noticed():
    source = "def f(x):\n    y = x + 1\n    # why\n    return y\n"
    assert_quoted("def f(x):\n    ...\n    return y\n", source)
    for drifted in ("def f(x):\n    return y\n", "def f(x):\n    ...\n    return x\n", "return y\n...\ndef f(x):\n"):
        with pytest.raises(AssertionError, match="not in the source"):
            assert_quoted(drifted, source)


@for_each_chapter
def test_code_runs(chapter, demo_checkpoint, monkeypatch):
    monkeypatch.chdir(ROOT)
    namespace: dict = {"__name__": "chapter"}
    expected_next, printed = False, ""
    for block in blocks(chapter):
        info, text = block["info"], block["text"]
        if info == "text output":
            assert expected_next, "an output without the code before it"
            assert printed == text
        expected_next = info == "python" and not block["path"]
        if expected_next:
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile(text, f"{chapter.folder.name}/README.md", "exec"), namespace)
            printed = output.getvalue()
        elif info == "bash":
            for line in text.splitlines():
                command = line.split("#")[0].strip()
                assert re.fullmatch(r"python -m chapters (read|lab|quiz|check) \d+( --[a-z]+( [\w./-]+)?)*", command)
        else:
            assert block["path"] or info in ("text", "text output", "text lab", "mermaid"), f"{info!r} is not checked"


# -- the lab ----------------------------------------------------------------------------------------------------------


def without_measurements(line: str) -> str:
    return re.sub(r"[\d.,]+|[█▏▎▍▌▋▊▉]+|\s+", "#", line) if "(measured)" in line else line


@for_each_chapter
def test_lab(chapter, demo_checkpoint, capsys):
    """The plain lab runs, fits its width, and prints what the text quotes from it."""
    assert main(["lab", str(chapter.number), "--plain"]) == 0
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) > 30
    assert all(len(line) <= WIDTH for line in printed.splitlines())
    lines = {without_measurements(line.rstrip()) for line in printed.splitlines()}
    quoted = [block["text"] for block in blocks(chapter) if block["info"] == "text lab"]
    assert quoted, "no number without the lab's output"
    for line in "".join(quoted).splitlines():
        assert without_measurements(line.rstrip()) in lines, f"the lab does not print: {line}"


def shown(app) -> str:
    """All panels as plain text."""
    console = Console(width=WIDTH, record=True, file=io.StringIO())
    for title, renderable in app.world.panels():
        console.print(title, renderable)
    return console.export_text()


@pytest.mark.parametrize("number", PLAYED)
def test_app(number, demo_checkpoint):
    """Every key and every button changes what is drawn, or says why there is nothing to change."""
    app = find_chapter(number).module("lab").make_app(None)

    async def assert_changes(pilot, act) -> None:
        await pilot.press("r")
        await pilot.press(app.actions[0].key)
        before = shown(app)
        act()
        await pilot.pause()
        assert shown(app) != before or str(app.query_one("#said", Static).render()), "nothing has changed"

    async def assert_typed(pilot, text: str) -> None:
        before = shown(app)
        app.query_one(Input).value = text
        await pilot.press("enter")
        assert shown(app) != before and app.focused is None, "keys act again, on what was typed"

    async def play() -> None:
        async with app.run_test(size=(100, 50)) as pilot:
            assert len(app.actions) >= 4 and "r" in [action.key for action in app.actions]
            for action in app.actions:
                for key in action.key.split(","):
                    await assert_changes(pilot, lambda: app.simulate_key(key))  # noqa: B023
                if action.label:
                    await assert_changes(pilot, app.query_one(f"#{action.method}", Button).press)
            if app.ask:
                await pilot.press("t")
                await assert_typed(pilot, "A [/b] prompt")
            await pilot.press("q")

    asyncio.run(play())


@pytest.mark.parametrize("fault", simulator.FAULTS)
def test_simulator_tells_what_a_fault_does(fault):
    """Blocks are marked wrong, or lost, with a fault and never without one."""
    world = simulator.Simulator(24 if "parent" in fault else 12, "pages and questions")
    while world.fault != fault:
        world.next_fault()
    said = ""
    for _ in range(12):
        if fault == "bytes(token_ids)":
            with pytest.raises(ValueError, match=r"range\(0, 256\)"):
                world.send()
            return
        said += world.send()
        if len(world.running) > (2 if fault == "references stay raised" else 1):
            world.end_oldest()
    while world.running:
        world.end_oldest()
    is_wrong = any(request.wrong for request in world.requests)
    is_lost = "refs" in str(world.draw_memory().renderables[0].renderables)
    assert ("WRONG" in said) == is_wrong == (fault not in ("", "references stay raised"))
    assert is_lost == (fault in ("references stay raised", "hits left in the free queue"))  # more, or less than 0


def test_simulator_keeps_salts_apart():
    world = simulator.Simulator()
    hits = []
    for salt in ("alice", "bob", "alice", None):
        world.salt = salt
        world.typed("how far does the light reach from here")
        hits.append(world.requests[-1].num_hits)
    assert hits == [0, 0, 2, 0]


# -- the quiz ---------------------------------------------------------------------------------------------------------


@for_each_chapter
def test_quiz(chapter):
    questions = quiz.load(chapter)
    assert len(questions) >= 5
    assert sum("answer" in question for question in questions) >= 1
    for question in questions:
        assert question["ask"] and question["why"]
        if "answer" in question:
            namespace: dict = {}
            exec(question["engine"], namespace)
            assert namespace["answer"] == question["answer"], question["ask"]
            assert question["unit"] and question["wrong"]
            assert all(float(value) != question["answer"] for value in question["wrong"])
        else:
            right = [option for option in question["options"] if option.get("right")]
            assert len(right) == 1 and len(question["options"]) >= 3
            assert all(option["why"] for option in question["options"] if option not in right)


@for_each_chapter
def test_quiz_is_asked(chapter, capsys):
    """All right with the right answers; with the wrong ones, each gets its explanation."""
    questions = quiz.load(chapter)

    def play(pick) -> tuple[int, str]:
        todo = iter(questions)
        console = Console(file=io.StringIO(), width=200)

        def read(prompt: str) -> str:
            question = next(todo)
            return pick(question, str(console.file.getvalue()))

        num_right, _ = quiz.run(chapter, console, read)
        return num_right, console.file.getvalue()

    def letter_of(text: str, shown: str) -> str:
        rendered = Console(file=io.StringIO(), width=200)
        rendered.print(quiz.Markdown(f"a) {text}"))
        line = rendered.file.getvalue().splitlines()[0][3:].rstrip()
        return next(row[0] for row in reversed(shown.splitlines()) if row[1:3] == ") " and row[3:].rstrip() == line)

    def right(question, shown):
        if "answer" in question:
            return str(question["answer"])
        return letter_of(next(o["text"] for o in question["options"] if o.get("right")), shown)

    def wrong(question, shown):
        if "answer" in question:
            return next(iter(question["wrong"]))
        return letter_of(next(o["text"] for o in question["options"] if not o.get("right")), shown)

    assert play(right)[0] == len(questions)
    num_right, shown = play(wrong)
    assert num_right == 0 and shown.count("The answer is") + shown.count("It is ") >= len(questions)


# -- the exercises ----------------------------------------------------------------------------------------------------


@for_each_chapter
def test_skeleton_is_not_started(chapter, checkpoint):
    bench, tasks = Bench(str(checkpoint())), chapter.module("checks").TASKS
    assert 2 <= len(tasks) <= 4
    for task in tasks:
        function = getattr(chapter.module("exercise"), task.name)
        assert len(function.__doc__) > 200, "the contract is in the docstring"
        assert grade(task, function, bench).not_started
        assert task.section in re.findall(r"^## (.*)$", text_of(chapter), re.MULTILINE), "the section to read again"


@pytest.fixture(scope="module")
def demo_bench(demo_checkpoint):
    return Bench(str(demo_checkpoint))


@for_each_chapter
def test_solution_passes(chapter, demo_bench):
    console = Console(file=io.StringIO(), width=100)
    results = grade_all(chapter.module("checks").TASKS, chapter.module("solution"), demo_bench, console)
    assert all(result.passed for result in results), console.file.getvalue()


def test_solutions_are_checked_by_the_command(checkpoint, capsys):
    assert main(["check", "4", "--solution", "--model", str(checkpoint())]) == 0, capsys.readouterr().out


def wrong_solutions():
    for chapter in CHAPTERS:
        module = importlib.import_module(f"wrong_solutions.{chapter.folder.name[:4]}")
        for task in chapter.module("checks").TASKS:
            for function, hint in module.WRONG[task.name]:
                yield pytest.param(task, function, hint, id=f"{chapter.folder.name[:4]}-{function.__name__}")


@pytest.fixture(scope="module")
def bench(checkpoint):
    return Bench(str(checkpoint()))


@pytest.mark.parametrize(("task", "function", "hint"), list(wrong_solutions()))
def test_wrong_solution_is_caught(task, function, hint, bench):
    result = grade(task, function, bench)
    assert not result.passed and not result.not_started
    assert hint in result.problem, result.problem


@for_each_chapter
def test_three_wrong_solutions_for_each_task(chapter):
    module = importlib.import_module(f"wrong_solutions.{chapter.folder.name[:4]}")
    for task in chapter.module("checks").TASKS:
        assert len({function for function, _ in module.WRONG[task.name]}) >= 3


@for_each_chapter
def test_signatures_agree(chapter):
    for task in chapter.module("checks").TASKS:
        ours, theirs = (getattr(chapter.module(name), task.name) for name in ("solution", "exercise"))
        assert inspect.signature(ours) == inspect.signature(theirs)


# -- grading itself ---------------------------------------------------------------------------------------------------


def make_task(check) -> Task:
    return Task("num_blocks_for", "The idea", lambda f: replaced(Bench, "num", f), (check,))


def test_grading(checkpoint, monkeypatch):
    monkeypatch.setattr(Bench, "num", None, raising=False)
    bench = Bench(str(checkpoint()))

    def check(function, bench):
        """counts"""
        if (got := function(3)) != 4:
            raise Wrong("one more", expected=4, got=got)

    assert grade(make_task(check), lambda n: n + 1, bench).passed
    assert grade(make_task(check), lambda n: n, bench).problem == "one more\nexpected: 4\ngot:      3"
    crash = grade(make_task(check), lambda n: n / 0, bench).problem
    assert "ZeroDivisionError" in crash and "test_course.py, line" in crash
    monkeypatch.setattr("chapters.grading.TIME_LIMIT_S", 1)

    def endless(n):
        while True:
            pass

    assert "a loop that never ends" in grade(make_task(check), endless, bench).problem
    assert Bench.num is None, "the engine is ours again"


def test_replaced_puts_back_what_was_there():
    """A classmethod as a classmethod, what an object had from its class not as its own."""

    class Owner:
        @classmethod
        def name(cls) -> str:
            return cls.__name__

    class Heir(Owner):
        pass

    for owner in (Owner, Heir, Heir()):
        before = dict(vars(owner))
        with replaced(owner, "name", lambda *args: "other"):
            assert owner.name() == "other"
        assert dict(vars(owner)) == before and Heir.name() == "Heir"


def test_same_tokens_shows_the_difference(checkpoint, monkeypatch):
    bench = Bench(str(checkpoint()))
    _ = bench.expected_tokens
    with replaced(bench, "generate", lambda: [[1, *tokens[1:]] for tokens in bench.expected_tokens]):
        with pytest.raises(Wrong, match="with other tokens, from token 0 on") as wrong:
            bench.same_tokens()
        assert wrong.value.expected != wrong.value.got


def test_a_broken_engine_is_replaced(checkpoint):
    """A check that leaves requests behind does not spoil the next one."""
    bench = Bench(str(checkpoint()))

    def use(function):
        return replaced(LLM, "abort", function)

    def leaves_a_request(function, bench):
        """leaves"""
        bench.llm.engine.add_request([5, 6], SamplingParams())
        raise Wrong("left")

    before = bench.llm
    assert not grade(Task("abort", "x", use, (leaves_a_request,)), None, bench).passed
    assert bench.llm is not before and not bench.llm.engine.has_unfinished_requests()


# -- the last page ----------------------------------------------------------------------------------------------------

PAGE = ROOT / "chapters" / "one_request.md"
LINK = re.compile(r"\[`([\w.]+)`\]\(\.\./(nanovllm/[\w/.]+)#L(\d+)\)")


def test_one_request(demo_checkpoint, monkeypatch):
    """The code prints what the page says, links lead to their symbols, and the order of the page is the engine's."""
    monkeypatch.chdir(ROOT)
    text = PAGE.read_text("utf-8")
    code, printed = (block["text"] for block in FENCE.finditer(text))
    first_call: dict[tuple[str, int], int] = {}  # of the last request

    def note(frame, event, arg) -> None:
        if event == "call":
            if frame.f_code is LLM.generate.__code__:
                first_call.clear()
            first_call.setdefault((frame.f_code.co_filename, frame.f_code.co_firstlineno), len(first_call))

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        sys.setprofile(note)
        try:
            exec(compile(code, str(PAGE), "exec"), {})
        finally:
            sys.setprofile(None)
    assert output.getvalue() == printed

    order = []
    for symbol, path, line in LINK.findall(text):
        node = node_of(path, symbol)
        assert int(line) == node.lineno, f"{symbol} is now at {path}#L{node.lineno}"
        if isinstance(node, ast.ClassDef):
            node = node_of(path, f"{symbol}.__init__")
        call = first_call.get((str(ROOT / path), first_line(node)))
        assert call is not None, f"{symbol} is never called"
        order.append((call, symbol))
    assert len(order) > 30 and order == sorted(order), "they first run in another order"


def test_one_request_leads_to_every_chapter():
    text = PAGE.read_text("utf-8")
    for chapter in CHAPTERS:
        assert f"\n[{chapter.number}]: {chapter.folder.name}/README.md\n" in text
        assert text.count(f"[{chapter.number}]") > 1, f"no stop belongs to chapter {chapter.number}"


# -- the command ------------------------------------------------------------------------------------------------------


def test_command(checkpoint, capsys, monkeypatch):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(chapter.title in shown for chapter in CHAPTERS) and "Next: python -m chapters read 1" in shown
    assert main(["read", "1"]) == 0
    capsys.readouterr()
    monkeypatch.setattr(Console, "input", lambda self, prompt="": "a" if "-" in prompt else "1")
    assert main(["quiz", "1"]) in (0, 1)
    assert main(["check", "1", "--model", str(checkpoint())]) == 1
    assert "not started" in capsys.readouterr().out
    assert main([]) == 0
    assert "Next: python -m chapters check 1" in capsys.readouterr().out
    assert main(["lab", "12"]) == 2 and "there is no chapter 12" in capsys.readouterr().err


def test_progress_survives_a_spoiled_file(tmp_path):
    progress = Progress()
    progress.note(CHAPTERS[0], read=True)
    progress.note(CHAPTERS[0], quiz=[3, 5])
    assert Progress().get(CHAPTERS[0]) == {"read": True, "quiz": [3, 5]}
    progress.path.write_text("{torn")
    assert Progress().get(CHAPTERS[0]) == {}


CRASH = """

def free(manager, seq):
    return 1 / 0
"""


def test_exercise_of_a_student(tmp_path, checkpoint, monkeypatch, capsys):
    """The whole way: a student's file in place of the skeleton, graded by the command, remembered."""
    chapter = find_chapter(4)
    monkeypatch.setitem(sys.modules, f"chapters.{chapter.folder.name}.exercise", chapter.module("solution"))
    assert main(["check", str(chapter.number), "--model", str(checkpoint())]) == 0
    assert Progress().get(chapter)["solved"] == [task.name for task in chapter.module("checks").TASKS]
    # And by a teacher, from a file of any name, with a crash in it.
    handed_in = tmp_path / "ada.py"
    handed_in.write_text((chapter.folder / "solution.py").read_text("utf-8").replace("def free(", "def free_(") + CRASH)
    assert main(["check", "4", "--file", str(handed_in), "--model", str(checkpoint())]) == 1
    shown = capsys.readouterr().out
    assert "ada.py, line" in shown and "ZeroDivisionError" in shown and "allocate: passed" in shown
    assert main(["check", "4", "--file", "nowhere.py", "--model", str(checkpoint())]) == 2


def test_report(checkpoint):
    console = Console(file=io.StringIO(), width=100)
    chapter = CHAPTERS[0]
    results = grade_all(chapter.module("checks").TASKS, chapter.module("exercise"), Bench(str(checkpoint())), console)
    assert not any(result.passed for result in results)
    assert "Read again: " in console.file.getvalue() and "0 of" in console.file.getvalue()


def test_lab_in_a_browser(monkeypatch):
    """--browser serves a command that, started by the server, runs the app and not the story."""
    served, ran = [], []
    monkeypatch.setattr("textual_serve.server.Server.serve", lambda self: served.append(self.command))
    assert main(["lab", "5", "--browser"]) == 0
    assert served[0].endswith("-m chapters lab 5")
    monkeypatch.setenv("TEXTUAL_DRIVER", "textual.drivers.web_driver:WebDriver")
    monkeypatch.setattr("chapters.explorer.Explorer.run", lambda self: ran.append(self.title))
    assert main(["lab", "5"]) == 0 and len(ran) == 1
    assert main(["lab", "2", "--browser"]) == 2


WITHOUT_TEXTUAL = """
import sys
sys.modules["textual"] = None
from chapters import __main__ as command
from chapters.story import Console
Console.is_terminal = True
for number in NUMBERS:
    command.find_chapter(number).module("lab").tell = lambda story: print("told")
    command.main(["lab", str(number)])
"""


def test_labs_without_textual():
    """Without the extra, the labs that one plays with are told as stories, and say what to install."""
    code = f"NUMBERS = {PLAYED}{WITHOUT_TEXTUAL}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("told") == result.stdout.count(".[labs]") == len(PLAYED)
