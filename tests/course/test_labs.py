"""The labs: what the notebooks print in a terminal, what one plays with, and the simulator of chapter 7."""

import ast
import contextlib
import os
import re
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from chapters import lab_notebook, playing
from chapters.__main__ import main
from chapters.ch04_paged_attention.memories import make_jobs
from chapters.ch06_prefill_decode import lab_parts as prefill_decode
from chapters.ch07_prefix_caching import beyond, drawing, simulator
from chapters.ch09_tensor_parallelism import lab_parts as tensor_parallel
from chapters.ch10_optimization_stack import setups
from chapters.ch11_benchmarks import lab_parts as benchmarks
from chapters.ch11_benchmarks.lab_parts import Peer
from chapters.ch12_fewer_bits import questions
from chapters.ch12_fewer_bits.rounding import Model
from chapters.course import find_chapter
from chapters.player import Player
from chapters.story import Story
from nanovllm import LLM
from nanovllm.core.scheduler import Scheduler
from tests.checkpoints import HYBRIDS, VARIANTS
from tests.course.course_text import CHAPTERS, ROOT, for_each_chapter, text_of
from tests.course.lab_stories import assert_recorded, assert_told, for_each_lab
from tests.marks import by_night

PLAYED = (3, 4, 5, 7, 8, 12, 13, 14, 15, 16, 17)  # the labs that one plays with
DEAR = (3, 4, 7, 8, 12, 13, 14, 15, 16, 17)  # of these: more than two seconds each


@for_each_lab(CHAPTERS[:8])
def test_lab(chapter, request, capsys, monkeypatch):
    assert_told(chapter, request, capsys, monkeypatch)


RUN_AGAIN = [5, *(by_night(number) for number in (1, 2, 3, 4, 9))]


@pytest.mark.parametrize("number", RUN_AGAIN)
def test_cells_run_again(number, any_model, monkeypatch, capsys):
    """Changing a number runs its cell again, and what needs it: no cell ends or removes what the others share."""
    once = lab_notebook.cells

    def twice(path):
        return [*once(path), *(cell for cell in once(path) if re.match("tell_|show_", cell[0]))]

    monkeypatch.setattr(lab_notebook, "cells", twice)
    short = {"PATIENCE_S": 0, "MAX_ROUNDS": 1, "make_jobs": lambda: make_jobs(20)}
    lab_notebook.run(find_chapter(number).folder / "lab.py", Story(str(any_model)), short)
    parts = [line for line in capsys.readouterr().out.splitlines() if re.match(r"\d+\. ", line)]
    assert len(parts) >= 2


@for_each_chapter
def test_a_text_quotes_what_was_recorded(chapter):
    assert_recorded(chapter)


@pytest.fixture
def run_cells(monkeypatch, any_model):
    """run_cells(number, names, given) runs these cells of a lab, and those before them that they all need."""
    all_cells = lab_notebook.cells

    def run(number: int, names: set[str], given: dict) -> Story:
        needed = {"setup", "start_it", "begin", "settings"} | names
        monkeypatch.setattr(lab_notebook, "cells", lambda path: [c for c in all_cells(path) if c[0] in needed])
        story = Story(str(any_model))
        lab_notebook.run(find_chapter(number).folder / "lab.py", story, given)
        return story

    return run


def test_steps_have_the_rows_that_a_table_says(run_cells, monkeypatch):
    """However many rounds: when the request ended, steps without work were timed."""
    computed = []
    schedule = Scheduler.schedule

    def watched(self, drafts):
        output = schedule(self, drafts)
        computed.append(output.num_tokens)
        return output

    monkeypatch.setattr(Scheduler, "schedule", watched)
    num_rows = (1, 2, 3, 4, 5, 6, 7, 8, 9, 40)
    run_cells(13, {"tell_rows"}, {"MAX_ROUNDS": 25, "NUM_ROWS": num_rows})
    rounds = [tuple(computed[start + 1 : start + 11]) for start in range(0, len(computed), 11)]
    assert rounds == [num_rows] * 25


@pytest.mark.parametrize("peers", [("a", "b", "c"), ("a",), ()])
def test_any_number_of_engines_take_turns(peers, run_cells, monkeypatch, capsys):
    class Pretended(Peer):
        def __init__(self, name, model):
            pass

        says = close = lambda self: ""
        seconds = lambda self, work: 1.0  # noqa: E731

    monkeypatch.setattr("chapters.ch11_benchmarks.lab_parts.Peer", Pretended)
    run_cells(11, {"tell_peers"}, {"PEERS": peers})
    assert re.findall(r"1\.0 times the output tokens of '(.)'", capsys.readouterr().out) == list(peers[1:])


INTERRUPTED = [
    (6, lambda world: world.prefill_s(32)),
    (6, lambda world: world.decode_s((4, 2))),
    (6, lambda world: world.one_request()),
    (6, lambda world: world.newcomer(64)),
    (9, lambda world: tensor_parallel.run(world.llm, ["a", "a"])),
    (9, lambda world: tensor_parallel.decode_s(world.llm)),
    (10, lambda world: world.decode_ms(3)),
    (10, lambda world: world.workload_ms(world.all_on, 2, True)),
    (11, lambda world: world.serve(world.arrivals(None, "x"))),
    (11, lambda world: world.serve_closed(world.arrivals(None, "x"), 3)),
]


@pytest.mark.parametrize(("number", "measure"), INTERRUPTED)
def test_a_cell_that_is_stopped_leaves_no_requests(number, measure, any_model, monkeypatch):
    """Else the next one would measure them, too."""
    story = Story(str(any_model))
    world = {
        6: lambda: prefill_decode.World(story),
        9: lambda: SimpleNamespace(llm=story.load(**tensor_parallel.OPTIONS)),
        10: lambda: setups.World(story.load),
        11: lambda: benchmarks.World(story),
    }[number]()
    engine = world.llm.engine
    with monkeypatch.context() as patch:
        patch.setattr(engine.model_runner, "run", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            measure(world)
    assert not engine.has_unfinished_requests() and not engine.scheduler.has_unfinished()
    engine.scheduler.check_integrity()
    measure(world)


def test_equal_prompts_have_answers_of_their_own(any_model):
    llm = Story(str(any_model)).load(**tensor_parallel.OPTIONS)
    _, tokens = tensor_parallel.run(llm, ["a", "a", "b"])
    assert [len(answer) for answer in tokens] == [12, 12, 12] and tokens[0] == tokens[1] != tokens[2]


class Played:
    """The playground of a lab's notebook, as marimo's kernel runs it: elements whose values change."""

    def __init__(self, number: int, monkeypatch, model: str | None = None) -> None:
        self.marimo = pytest.importorskip("marimo")
        monkeypatch.setattr(playing, "notebook", lambda: self.marimo)
        self.turns = 0
        monkeypatch.setattr(self.marimo, "state", lambda *args, **options: (lambda: self.turns, self._turn))
        names: dict = {}
        with telling(Story(model)):
            for cell, body in lab_notebook.cells(find_chapter(number).folder / "lab.py"):
                if cell in ("setup", "play_it"):
                    exec(compile(ast.Module(body, []), cell, "exec"), names)
        self.player = names["player"]
        self.controls = self.player.controls()

    def _turn(self, update) -> None:
        self.turns = update(self.turns)

    def press(self, name: str, value=1) -> None:
        """As a click does; the cell that shows the controls runs again if the turn has changed."""
        before = self.turns
        self.controls._update({name: value})
        if self.turns != before:
            self.controls = self.player.controls()

    @property
    def shown(self) -> str:
        """Without the controls, whose ids are new each time."""
        text = self.player.show(self.controls).text
        return re.sub(r"<marimo-ui-element.*?</marimo-ui-element>", "", text, flags=re.DOTALL)


def bare(html: str) -> str:
    return re.sub("<[^>]*>", "", html)


@contextlib.contextmanager
def telling(story: Story):
    lab_notebook._running.append(story)
    try:
        yield
    finally:
        lab_notebook._running.pop()


@pytest.mark.parametrize("number", [pytest.param(n, marks=[pytest.mark.nightly] * (n in DEAR)) for n in PLAYED])
def test_what_one_plays_with(number, any_model, monkeypatch):
    """Every button changes what is shown, and a text field takes a text."""
    played = Played(number, monkeypatch, str(any_model))
    acts = [name for name in played.controls if name.startswith("act ")]
    green = [name for name in played.controls if "success" in str(played.controls[name]._component_args)]
    assert len(green) == 1 and len(acts) >= 3, "one button is the first to press"
    for name in acts:
        played.press(acts[0])
        before, turns = played.shown, played.turns
        played.press(name)
        assert played.turns == turns + 1 and played.shown != before, name
    if "ask" in played.controls:
        before = played.shown
        played.press("ask", "A [/b] prompt <b>")
        assert played.shown != before and "prompt <b>" not in played.shown


KEY = re.compile(r"press (\w)\b|(?<!['\w])\b([b-z]) (?:lets|[a-z]+s)\b(?!=)|\(([a-z](?:, [a-z])*)\)")
SPEAKING = "world sliders simulator beyond shelf notebook lab_parts drawing beyond_drawing".split()


@pytest.mark.parametrize("number", PLAYED)
def test_a_lab_names_no_key_that_it_does_not_have(number):
    """As "n makes a step", "press k" or "End a request (e)", in what its world and its panels say."""
    chapter = find_chapter(number)
    has_page = (chapter.folder / "page.py").exists()
    keys = {action.key for action in chapter.module("page" if has_page else "lab_parts").ACTIONS}
    paths = [path for name in SPEAKING if (path := chapter.folder / f"{name}.py").exists()]
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    for named in (named for text in texts for named in KEY.finditer(text)):
        assert set("".join(filter(None, named.groups()))) - set(", ") <= keys, named[0]


@pytest.mark.parametrize("number", [4, 5, *(by_night(n) for n in (7, 16))])
def test_the_notebook_has_the_scenes_that_a_text_names(number, monkeypatch):
    """The green button goes through all of them, one after another, and each ends as it does on the page."""
    chapter = find_chapter(number)
    played, page, seen = Played(number, monkeypatch), chapter.module("page"), []
    for scene in page.SCENES:
        assert scene.title in played.controls["scenes"].selected_key
        seen.append(scene.title)
        on_page = Player(page, scene.link)
        while on_page.ahead:
            on_page.forward()
            played.press("next")
        assert bare(playing.panels_of_page(page.panels(on_page.world))) in bare(played.shown)
        if scene is page.SCENES[0]:
            shown = played.shown
            played.press("back")
            assert bare(played.shown) != bare(shown)
            played.press("next")
            assert bare(played.shown) == bare(shown)
        if scene is not page.SCENES[-1]:
            played.press("next")
    assert "next" not in played.controls, "the last scene has ended"
    played.press("scenes", [seen[1]])
    assert played.controls["scenes"].selected_key == seen[1]
    named = re.findall(r"\*In the lab: ([^*]+)\.\*", text_of(chapter))
    assert named and set(named) <= set(seen)


@pytest.mark.parametrize(
    ("title", "quoted"),
    [
        ("Holes", "F, 9 tokens: contiguous refuses (wants 25, longest hole 22), paged takes blocks 11 12 13"),
        ("The pool runs dry", "append_slots said False to A, B, C, F, H, I: no block is free"),
    ],
)
def test_a_scene_tells_what_its_text_tells(title, quoted):
    chapter = find_chapter(4)
    page = chapter.module("page")
    [scene] = [scene for scene in page.SCENES if scene.title == title]
    player, said = Player(page, scene.link), ""
    while player.ahead:
        player.forward()
        said += f"{player.said}\n"
    assert quoted in said and quoted in text_of(chapter)


def test_a_step_of_two_schedulers_says_what_it_did():
    """And that all requests have ended only where those of the static batches have, too."""
    page = find_chapter(5).module("page")
    said = []
    for scene in page.SCENES:
        player = Player(page, scene.link)
        while player.ahead:
            player.forward()
            ended = not player.world.ours.has_unfinished() and not player.world.static.has_unfinished()
            assert ("All requests have ended" in player.said) == (ended and player.done[-1].key == "s")
            said.append(player.said)
    assert said[0] == "Step 1: 16 tokens. Admitted: A B C."
    assert all(any(what in each for each in said) for what in ("Preempted: ", "Ended: ", "Only the static batches"))


WRONG_KV = "tokens hashed without their parent", "hits left in the free queue", "hashes stay"


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
    is_lost = "refs" in str(drawing.draw_memory(world).renderables[0].renderables)
    assert ("WRONG" in said) == is_wrong == (fault in WRONG_KV)
    assert is_lost == (fault in ("references stay raised", "hits left in the free queue"))  # more, or less than 0


def test_simulator_tells_of_a_prompt_without_logits():
    world = simulator.Simulator()
    while world.fault != "nothing is left to compute":
        world.next_fault()
    said = [world.typed("one two three four five six seven eight") for _ in range(2)]
    assert "tokens computed: 8" in said[0] and "no logits" in said[1]


def test_simulator_says_that_all_are_known_only_if_they_are():
    """A last token that is computed is not always one that was found."""
    world = simulator.Simulator()
    for text, is_known in (
        ("zebra", False),
        ("you keep a small lighthouse answer in short", False),
        ("you keep a small lighthouse answer in short", True),
        ("you keep a small lighthouse answer in short zebra", False),
    ):
        assert ("all are known" in world.typed(text)) == is_known
    assert simulator.Simulator().typed("zebra").startswith("A: 1 token; ")


def test_simulator_says_why_it_refuses():
    """To end a request helps only while one is running."""
    world = simulator.Simulator(8)
    assert world.typed(" ".join(map(str, range(36)))).endswith("The pool has no more.")
    while world.fault != "references stay raised":
        world.next_fault()
    texts = "one two three four five six seven eight", " ".join(map(str, range(28)))
    for text in texts:
        said = world.typed(text)
    assert said.endswith("End a request (e).")
    world.typed(f"{texts[0]} {texts[1]}")  # is refused, and its hits keep their references
    world.end_oldest()
    said = world.typed(texts[1])
    assert said.endswith("The other 2 are lost: no request holds them, and they are not in the queue.")


def test_the_example_starts_over_after_an_action_of_ones_own():
    world = simulator.Simulator()
    for act in (world.example, world.example, world.end_oldest):
        act()
    assert world.example().startswith("Ten blocks, all free")


def test_simulator_keeps_salts_apart():
    world = simulator.Simulator()
    hits = []
    for salt in ("alice", "bob", "alice", None):
        world.salt = salt
        world.typed("how far does the light reach from here")
        hits.append(world.requests[-1].num_hits)
    assert hits == [0, 0, 2, 0]


def test_simulator_tells_pictures_apart():
    """By extra keys alone, and K/V of another picture is wrong: with the first fault, a request reads it."""
    world = simulator.Simulator()
    for fault, hits in (("", [0, 1, 3]), ("tokens hashed without their parent", [0, 3, 3])):
        while world.fault != fault:
            world.next_fault()
        for picture in ("[boat]", "[gull]", "[boat]"):
            world.typed(f"one two three four five {picture} six")
        assert [request.num_hits for request in world.requests] == hits
        assert [bool(request.wrong) for request in world.requests] == [False, bool(fault), False]


def test_with_room_below_the_pool_nothing_is_computed_twice():
    """A disk that holds all of it; a smaller one has whole chains, whatever it had to forget."""
    for order in beyond.ORDERS:
        alone, below = (beyond.played(order, 10, **sizes).totals() for sizes in ({"memory": 0, "disk": 0}, {}))
        assert sum(alone.values()) == sum(below.values())
        assert below["computed"] == beyond.played(order, pool=80, memory=0, disk=0).totals()["computed"]
        assert alone["computed"] > below["computed"]
        disk = beyond.played(order, memory=0, disk=20).disk
        assert len(disk.kept) == 20
        assert all(
            kept.record.parent_hash is None or kept.record.parent_hash in disk.kept for kept in disk.kept.values()
        )


def test_a_slider_plays_all_again():
    world = beyond.Conversations(memory=0, disk=0)
    for act in (world.come_back, world.restart, world.come_back):
        act()
    said = world.next_disk(), world.next_memory()
    assert all("has room for 20 blocks" in each for each in said)
    assert [visit.name for visit in world.visits] == ["Ada 1", "Ben 1"] and world.restarts == [1]
    assert world.visits[1].tokens()["disk"] == 12, "Ben finds what Ada's process has written"


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in HYBRIDS])
def test_shuffled_dimensions_are_the_same_function(checkpoint, variant):
    options = dict(dtype="float32", enforce_eager=True, num_gpu_blocks_override=64, max_model_len=128)
    llm = LLM(str(checkpoint(variant)), **options)
    model = Model(llm)
    model.read("the quick brown fox jumps over the lazy dog")
    before = {name: weight.clone() for name, weight in model.weights.items()}
    model.shuffle()
    assert abs(model.change().divergence) < 1e-6
    assert not any(torch.equal(before[name], weight) for name, weight in model.weights.items())
    model.shuffle()
    assert all(torch.equal(before[name], weight) for name, weight in model.weights.items())


def test_twenty_questions(checkpoint, capsys):
    questions.main([str(checkpoint()), "--max-tokens", "2"])
    printed = capsys.readouterr().out
    assert all(f"\n| {question} | " in printed for question in questions.QUESTIONS)
    assert re.search(r"20 answers, .*: \d+ in int8, \d+ in int4, \d+ in int4, shuffled", printed)


def test_twenty_questions_want_at_least_a_token(capsys):
    """Said before a model is looked for."""
    for number in ("0", "-3"):
        with pytest.raises(SystemExit):
            questions.main(["/nonexistent/model", "--max-tokens", number])
        assert f"--max-tokens must be 1 or more, found {number}" in capsys.readouterr().err


def test_another_engine_that_ends_says_why():
    peer = Peer("nanovllm", "/nonexistent/model")
    for asked in (peer.says, lambda: peer.seconds([([1], 2)])):
        with pytest.raises(ValueError, match=r"started by peer\.py, .*/nonexistent/model' does not exist"):
            asked()
    peer.close()


def test_the_notebook_is_opened_in_a_browser(monkeypatch):
    """By marimo's editor, with this checkpoint; without marimo a terminal says what to install, and the lab runs."""
    pytest.importorskip("marimo")
    ran = []
    monkeypatch.setattr(
        lab_notebook.subprocess, "run", lambda command, **how: ran.append(command) or SimpleNamespace(returncode=0)
    )
    assert main(["lab", "5", "--browser", "--model", "somewhere"]) == 0
    assert ran[0][1:4] == ["-m", "marimo", "edit"] and ran[0][-3:] == ["--", "--model", "somewhere"]
    assert "ch05_scheduler/lab.py" in ran[0][4]


@pytest.mark.parametrize("arguments", [["--browser"], []])
def test_a_lab_without_marimo(arguments, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "marimo", None)
    monkeypatch.setattr("chapters.__main__.find_spec", lambda name: None)
    assert main(["lab", "5", *arguments]) == 0
    printed = capsys.readouterr().out
    assert ('pip install -e ".[labs]"' in printed) == bool(arguments)
    assert "1. One request, from WAITING to FINISHED" in printed


@pytest.mark.parametrize("number", [by_night(4), 5])
def test_marimo_runs_the_notebook_as_we_do(number, processes, capsys):
    """As a script: marimo sorts the cells by what they need, run() takes them in their order."""
    pytest.importorskip("marimo")
    status, out, err = processes.run(
        str(find_chapter(number).folder / "lab.py"), cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert status == 0, err
    assert main(["lab", str(number), "--plain"]) == 0
    assert out.replace("\r", "") == capsys.readouterr().out


def test_notebooks_are_as_marimo_writes_them():
    """So that playing with one, which saves it, changes nothing; and no two cells define one name."""
    converters = pytest.importorskip("marimo._convert.converters")
    from marimo._lint import run_check

    for chapter in CHAPTERS:
        text = (chapter.folder / "lab.py").read_text("utf-8")
        written = converters.MarimoConvert.from_py(text).to_py()
        without_breaks = [re.sub(r"[\s(),]+", "", each) for each in (text, written)]
        assert without_breaks[0] == without_breaks[1], chapter.folder.name
        assert run_check((str(chapter.folder / "lab.py"),)).issues_count == 0


@for_each_chapter
def test_a_cell_is_not_named_like_what_another_one_calls(chapter):
    [(_, setup), *others] = lab_notebook.cells(chapter.folder / "lab.py")
    imports = [each for each in setup if isinstance(each, ast.Import | ast.ImportFrom)]
    imported = {alias.asname or alias.name for each in imports for alias in each.names}
    assert imported and not imported & {name for name, _ in others}


@for_each_chapter
def test_a_notebook_shows_what_it_tells_before_its_code(chapter):
    """And all of it: as wide as the tables are, and without scrolling inside a cell."""
    manager = pytest.importorskip("marimo._config.manager")
    notebook = chapter.folder / "lab.py"
    config = manager.get_default_config_manager(current_path=str(notebook)).get_config()
    assert config["display"]["cell_output"] == "above"
    text = notebook.read_text("utf-8")
    assert 'marimo.App(width="medium"' in text
    assert "def show_it" not in text or "@app.cell(hide_code=True, expand_output=True)\ndef show_it" in text
    for cell in re.split(r"^@app\.", text, flags=re.MULTILINE):
        if "story.part(" in cell:
            assert cell.startswith("cell(expand_output=True)\n"), cell


MEANT = re.compile(r"(story\.(part|say|show|log|enter)|title|player\.show)\(|tell_\w+\(story\b|start$")


@for_each_chapter
def test_a_cell_shows_what_is_meant_to_be_seen(chapter):
    """marimo shows the value of a cell's last line, whatever it is: a list of outputs, how much garbage there was."""
    for name, body in lab_notebook.cells(chapter.folder / "lab.py"):
        if isinstance(last := body[-1], ast.Expr):
            assert MEANT.match(ast.unparse(last)), f"{name} ends with {ast.unparse(last)}"
