"""The server's page in a real browser: the chat, and the engine beside it."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

import pytest

from nanovllm.serving.http import html_pictures
from nanovllm.serving.http.options import ServeOptions
from tests.checkpoints import make_checkpoint
from tests.servers import PATIENCE_S, serving
from tests.site_browser import assert_accessible

PAGE = Path(html_pictures.__file__).parent / "page"
ORDER = ("free", "cached or free", "held")
ENGINE = dict(block_size=4, num_gpu_blocks_override=64, max_model_len=256)


@pytest.fixture(scope="module")
def server(checkpoint):
    with serving(checkpoint(), ServeOptions(classroom=True), num_gpu_blocks_override=64) as running:
        yield running


@pytest.fixture
def open_page(browser, server):
    """open_page() -> a tab; nothing may go wrong in it."""
    tabs, problems = [], []

    def get(**options):
        tab = browser.new_page(**options)
        tab.set_default_timeout(PATIENCE_S * 1000)
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("console", lambda message: problems.append(message.text) if _is_problem(message) else None)
        tab.goto(server.url)
        tab.wait_for_selector("#pool .block")
        tab.click("#settings summary")
        tab.fill("#temperature", "0")
        tabs.append(tab)
        return tab

    yield get
    for tab in tabs:
        tab.close()
    assert not problems
    server.llm.thread.set_pace()
    server.assert_at_rest()
    server.until(lambda: server.engine.block_manager.on_event is None)


def _is_problem(message) -> bool:
    return message.type == "error" and "status of 400" not in message.text  # an answer that is an error is logged, too


def ask(tab, text: str, max_tokens: int = 6) -> None:
    tab.fill("#max_tokens", str(max_tokens))
    tab.fill("#text", text)
    tab.press("#text", "Enter")


def answer(tab) -> tuple[str, str]:
    """The newest answer when it has ended, and what stands below it."""
    tab.wait_for_selector("#send:not([hidden])")
    newest = tab.locator("#messages > .assistant").last
    return newest.locator(".content").text_content(), newest.locator("small").text_content()


def expected(server, messages: list[str], max_tokens: int) -> str:
    roles = ("user", "assistant")
    chat = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
    made = server.client().chat.completions.create(model="tiny", messages=chat, max_tokens=max_tokens, temperature=0)
    return made.choices[0].message.content


def test_chat_edit_and_what_it_cost(server, open_page):
    tab = open_page()
    ask(tab, "two gulls")
    first, note = answer(tab)
    assert first == expected(server, ["two gulls"], 6)
    assert "prompt tokens, 0 found in the cache; first token after" in note
    ask(tab, "<b>a red boat</b>")
    second, note = answer(tab)
    assert second == expected(server, ["two gulls", first, "<b>a red boat</b>"], 6)
    assert " 0 found" not in note, "the conversation so far is in the cache"
    assert tab.locator("#messages > li").count() == 4 and not tab.locator("#messages b:not(.who)").count()

    tab.click("text=Edit >> nth=0")
    tab.fill("#messages textarea", "the lazy dog")
    tab.press("#messages textarea", "Enter")
    assert answer(tab)[0] == expected(server, ["the lazy dog"], 6)
    assert tab.locator("#messages > li").count() == 2
    tab.click("text=Edit")
    tab.click("text=Cancel")
    assert tab.locator("#messages > li").count() == 2
    tab.click("text=New chat")
    assert tab.locator("#messages > li").count() == 0


def test_a_blocks_label_is_in_the_legend():
    styles, page = ((PAGE / name).read_text("utf-8") for name in ("pictures.css", "index.html"))
    labels = re.findall(r'\.block\[data-event=(\w+)\]::after \{ content: "(\w+)"', styles)
    assert len(labels) == 5
    for event, label in labels:
        assert re.search(rf'data-event="{event}"></i>[^<]*\b{label}\b', page), label


def test_what_the_pool_shows_is_said(open_page):
    """Of each state and of each event, in words; and how to see memory run out."""
    tab = open_page()
    assert tab.get_attribute("#pool .block >> nth=0", "title").startswith("block 0: ")
    legend = " ".join(tab.locator(".legend:visible").all_inner_texts())
    for word in (
        "free:",
        "cached:",
        "held by one",
        "shared",
        "just taken",
        "registered:",
        "hit:",
        "just freed",
        "evicted:",
    ):
        assert word in legend
    tab.click("#run-out summary")
    assert "--num-gpu-blocks-override 48" in tab.inner_text("#run-out") and tab.locator("#run-out p").is_visible()


def test_stop_frees_and_keeps_what_there_is(server, open_page):
    tab = open_page()
    server.llm.thread.set_pace(3)
    ask(tab, "two gulls", 200)
    tab.wait_for_selector("#messages .who")  # it knows its name in the pictures
    assert tab.locator("#running .card.mine .who").text_content() in tab.locator("#messages .who").text_content()
    server.until(lambda: server.llm.thread.steps_left == 0)
    tab.click("#stop")
    server.assert_at_rest()  # without a step
    text, note = answer(tab)
    assert text and note == "stopped"


def test_what_goes_wrong_is_said(server, open_page):
    tab = open_page()
    ask(tab, "the quick brown fox " * 200)
    tab.wait_for_selector("#problem:not([hidden])")
    assert "max_model_len is 256" in tab.text_content("#problem")
    assert tab.locator("#messages > li").count() == 1, "the question can be edited"


def test_two_tabs_see_one_engine(server, open_page):
    """Pause, step and slow motion from one tab; the requests of both in the pictures of both."""
    tabs = open_page(), open_page()
    tabs[0].click("#pause")
    for tab in tabs:
        tab.wait_for_selector("#pause:text('Go on')")
    for tab, text in zip(tabs, ("two gulls", "two gulls circled"), strict=True):
        ask(tab, text, 50)
    for tab in tabs:
        tab.wait_for_selector("#waiting .card >> nth=1")
    num_steps = server.call(lambda: server.engine.stats.num_steps)
    tabs[1].click("#step")
    for tab in tabs:
        tab.wait_for_selector("#running .card >> nth=1")
        tab.wait_for_selector("#pool .block.shared")
        tab.wait_for_selector("#running .mine")
        assert "Paused" in tab.text_content("#link") and tab.locator("#running .mine").count() == 1
    assert server.call(lambda: server.engine.stats.num_steps) == num_steps + 1
    held = server.call(lambda: [bool(block.ref_count) for block in server.engine.block_manager.blocks])
    for tab in tabs:
        classes = tab.eval_on_selector_all("#pool .block", "cells => cells.map(cell => cell.className)")
        assert [("held" in names or "shared" in names) for names in classes] == held
    tabs[0].evaluate("() => { const s = document.getElementById('delay'); s.value = 0.1; s.oninput(); }")
    tabs[1].wait_for_selector("#delay-text:has-text('0.1 s')")
    server.until(lambda: server.llm.thread.delay_s == 0.1)
    tabs[1].evaluate("() => { const s = document.getElementById('delay'); s.value = 0; s.oninput(); }")
    server.until(lambda: server.llm.thread.delay_s == 0)
    tabs[0].click("#pause")
    for tab in tabs:
        assert answer(tab)[0]
    tabs[0].click("#forget")
    tabs[1].wait_for_selector("#pool .cached", state="detached")


def wait_for_folded(server, tab) -> None:
    """One cell for 24 and more that nobody holds, with their blocks; the others are alone. A cell is two blocks."""

    def expected() -> list[str]:
        size, shown = server.inside.drawing.cell_size, []
        blocks = server.engine.block_manager.blocks
        said = ["held" if block.ref_count else "cached or free" if block.block_hash else "free" for block in blocks]
        cells = [max(said[start : start + size], key=ORDER.index) for start in range(0, len(said), size)]
        for state, run in groupby(range(len(cells)), cells.__getitem__):
            run = list(run)
            ids = range(run[0] * size, min((run[-1] + 1) * size, len(blocks)))
            is_folded = state != "held" and len(run) >= 24
            shown += [f"{ids[0]} to {ids[-1]}{len(ids):,} {state}"] if is_folded else ["."] * len(run)
        return shown

    shown = (
        "[...document.querySelectorAll('#pool .block')].map((cell) => cell.matches('.run') ? cell.textContent : '.')"
    )
    tab.wait_for_function(f"(expected) => {shown}.join() === expected", arg=",".join(server.call(expected)))


def test_keys_small_screens_and_access(checkpoint, browser):
    engine = ENGINE | {"num_gpu_blocks_override": 4501}
    with serving(checkpoint(), ServeOptions(api_key=("secret",)), **engine) as server:
        tab = browser.new_page(viewport={"width": 360, "height": 740})
        tab.set_default_timeout(PATIENCE_S * 1000)
        tab.goto(server.url)
        tab.wait_for_selector("#link:has-text('a key is needed')")
        ask_key = tab.locator("#key")
        tab.click("#settings summary")
        ask_key.fill("secret")
        ask_key.press("Tab")
        tab.wait_for_selector("#pool .run:has-text('4,501 free')")
        tab.fill("#text", "two gulls")
        tab.press("#text", "Enter")
        assert answer(tab)[0]
        client = server.client("secret")
        client.completions.create(model="tiny", prompt=[19] * 250, max_tokens=1)
        wait_for_folded(server, tab)
        server.llm.thread.set_pace(0)
        with ThreadPoolExecutor(16) as pool:
            for number in range(16):
                given = dict(model="tiny", prompt=[20 + number] * 200, max_tokens=5)
                pool.submit(client.completions.create, **given)
            server.until(lambda: len(server.engine.requests) == 16)
            server.llm.thread.set_pace(3)
            server.until(lambda: server.llm.thread.steps_left == 0)
            wait_for_folded(server, tab)
            assert tab.locator("#pool .block").count() > 320 and tab.locator("#pool.tiny .run").count() == 2
            assert tab.evaluate("document.documentElement.scrollWidth") <= 360
            assert_accessible(tab, ("minor", "moderate", "serious", "critical"))
            server.llm.thread.set_pace()
        assert_accessible(tab, ("minor", "moderate", "serious", "critical"))
        tab.close()


WEATHER = {"name": "weather", "parameters": {"properties": {"place": {"enum": ["Oslo"]}}, "required": ["place"]}}


def test_calls_of_tools_and_snapshots(tmp_path, browser):
    """A hybrid model is made to call; who sits before the page is the tool."""
    engine = ENGINE | dict(num_gpu_blocks_override=300, max_model_len=1000, max_num_batched_tokens=512)
    make_checkpoint(tmp_path, "qwen3.5", max_position_embeddings=1024)
    with serving(tmp_path, **engine) as server:
        tab = browser.new_page()
        tab.set_default_timeout(PATIENCE_S * 1000)
        tab.goto(server.url)
        tab.click("#settings summary")
        tab.fill("#tools", json.dumps([{"type": "function", "function": WEATHER}]))
        tab.select_option("#tool_choice", "required")
        ask(tab, "two gulls", 60)
        assert answer(tab)[0] == ""
        assert tab.text_content(".call code") == 'weather({"place": "Oslo"})'
        tab.select_option("#tool_choice", "none")
        tab.fill(".call input", "a red boat")
        tab.click("text=Send the result")
        tab.wait_for_selector("#messages > .assistant:nth-child(4)")
        assert "found in the cache" in answer(tab)[1]
        assert tab.locator(".call input").count() == 0
        assert tab.text_content("#messages > .tool .content") == "a red boat"
        taken = len(server.engine.block_manager.snapshots.by_hash)
        tab.wait_for_function("(taken) => document.querySelectorAll('#pool .snapshot').length === taken", arg=taken)
        assert tab.locator("#counters").get_by_text("snapshots").is_visible() and tab.is_visible("#of-snapshots")
        tab.close()


def test_reasoning(open_page):
    tab = open_page()
    deltas = {"role": "assistant"}, {"reasoning": "two and "}, {"reasoning": "two"}, {"content": "Four."}
    chunks = [{"id": "chatcmpl-1", "choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    tab.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    ask(tab, "2 + 2?")
    tab.wait_for_selector("#send:not([hidden])")
    assert tab.locator("#messages .reasoning .content").text_content() == "two and two"
    assert tab.locator("#messages .assistant > .content").text_content() == "Four."
    assert not tab.locator("#messages .reasoning .content").is_visible()  # it is folded
    tab.click("#messages .reasoning summary")
    assert tab.locator("#messages .reasoning .content").is_visible()
