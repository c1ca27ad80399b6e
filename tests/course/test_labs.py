"""The labs: what the plain ones print, the keys and buttons of the played ones, and the simulator of chapter 7."""

import asyncio
import io
import re

import pytest
import torch
from rich.console import Console
from textual.widgets import Button, Input, Static

from chapters.__main__ import main
from chapters.ch07_prefix_caching import beyond, drawing, simulator
from chapters.ch12_fewer_bits import questions
from chapters.ch12_fewer_bits.rounding import Model
from chapters.course import find_chapter
from chapters.site.player import Player
from chapters.story import WIDTH
from nanovllm import LLM
from tests.checkpoints import HYBRIDS, VARIANTS
from tests.course.course_text import CHAPTERS, ROOT, for_each_chapter, text_of
from tests.course.lab_stories import assert_recorded, assert_told, for_each_lab

PLAYED = (3, 4, 5, 7, 8, 12, 13, 14, 15, 16, 17)  # the labs that are apps
DEAR = (3, 4, 7, 8, 12, 13, 14, 15, 16, 17)  # of these: more than two seconds each


@for_each_lab(CHAPTERS[:8])
def test_lab(chapter, request, capsys, monkeypatch):
    assert_told(chapter, request, capsys, monkeypatch)


@for_each_chapter
def test_a_text_quotes_what_was_recorded(chapter):
    assert_recorded(chapter)


def shown(app) -> str:
    """All panels as plain text."""
    console = Console(width=WIDTH, record=True, file=io.StringIO())
    for title, renderable in app.panels():
        console.print(title, renderable)
    return console.export_text()


@pytest.mark.parametrize("number", [pytest.param(n, marks=[pytest.mark.ci] * (n in DEAR)) for n in PLAYED])
def test_app(number, any_model):
    """Every key changes what is drawn, or says why there is nothing to change; a button does what its key does."""
    app = find_chapter(number).module("lab").make_app(str(any_model))

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
            buttons = [app.query_one(f"#{action.method}", Button) for action in app.actions if action.label]
            assert all(app.screen.region.contains_region(button.region) for button in buttons), "none is cut"
            await assert_changes(pilot, buttons[-1].press)
            if app.ask:
                await pilot.press("t")
                await assert_typed(pilot, "A [/b] prompt")
            await pilot.press("q")

    asyncio.run(play())


@pytest.mark.parametrize("number", [4, 5, *(pytest.param(n, marks=pytest.mark.ci) for n in (7, 16))])
def test_the_terminal_has_the_scenes_that_a_text_names(number):
    """One after another, and each ends as it does on the page."""
    chapter = find_chapter(number)
    app, page, seen = chapter.module("lab").make_app(None), chapter.module("page"), []

    async def play() -> None:
        async with app.run_test(size=(100, 50)) as pilot:
            for scene in page.SCENES:
                await pilot.press("right_square_bracket")
                said = str(app.query_one("#said", Static).render())
                assert said.startswith(scene.title) and scene.text in said
                seen.append(scene.title)
                on_page = Player(page, scene.link)
                while on_page.ahead:
                    on_page.forward()
                    await pilot.press("full_stop")
                assert "has ended" in str(app.query_one("#said", Static).render())
                theirs = Console(width=WIDTH, record=True, file=io.StringIO())
                for title, renderable in app.draw_panels(on_page.world):
                    theirs.print(title, renderable)
                assert shown(app) == theirs.export_text()

    asyncio.run(play())
    named = re.findall(r"\*In the lab: ([^*]+)\.\*", text_of(chapter))
    assert named and set(named) <= set(seen)


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
    command.find_chapter(number).module("lab").tell = lambda story: story.say("told")
    command.main(["lab", str(number)])
"""


@pytest.mark.ci
def test_labs_without_textual(processes):
    """Without the extra, the labs that one plays with are told as stories, and say what to install."""
    code = f"NUMBERS = {PLAYED}{WITHOUT_TEXTUAL}"
    status, out, err = processes.run("-c", code, cwd=ROOT)
    assert status == 0, err
    assert out.count("told") == out.count(".[labs]") == len(PLAYED)
