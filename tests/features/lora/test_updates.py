"""Adapters that come and go while an engine runs: its methods, asyncio's, the server's endpoints."""

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nanovllm import LLM, LoRARequest, SamplingParams
from nanovllm.features.lora.adapter import Adapter
from nanovllm.sampling_params import BeamSearchParams
from nanovllm.serving.async_llm import AsyncLLM
from nanovllm.serving.http.options import ServeOptions
from tests.checkpoints import SMALL, make_checkpoint
from tests.errors import expect
from tests.faults import run_to_end
from tests.features.lora.adapters import ATTENTION, IN_THREES, SHARED, make_adapter
from tests.marks import by_night
from tests.servers import Running, serving

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base"), "llama", **IN_THREES)


@pytest.fixture(scope="module")
def paths(base, tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("adapters")
    return [str(make_adapter(folder / str(i), base, i, r=4, target_modules=ATTENTION)) for i in range(3)]


@pytest.fixture(scope="module")
def answers(base, paths) -> list[list[int]]:
    """What each of them makes of the same prompt, in an engine that knows no other."""
    found = []
    for path in paths:
        llm = LLM(str(base), dtype="float32", enable_lora=True, **SMALL)
        found.append(llm.generate([SHARED], GREEDY, lora_request=LoRARequest("x", 1, path))[0].outputs[0].token_ids)
    assert len(set(map(tuple, found))) == 3
    return found


@pytest.fixture
def folder(paths, tmp_path) -> Path:
    """An adapter whose files change."""
    return Path(shutil.copytree(paths[0], tmp_path / "adapter"))


def put(path: str, folder: Path) -> None:
    shutil.copy(Path(path, "adapter_model.safetensors"), folder)


@pytest.mark.parametrize("num_ranks", [1, by_night(3)])
def test_weights_that_are_replaced(base, paths, answers, folder, processes, num_ranks):
    """K/V of earlier weights is not found, what runs with them ends with them, and the same ones find theirs again."""
    options = dict(dtype="float32", enable_lora=True, max_loras=2) | SMALL
    llm = processes.llm(base, num_ranks, **options) if num_ranks > 1 else LLM(str(base), **options)
    engine, lora = llm.llm_engine, LoRARequest("x", 7, str(folder))
    in_place = LoRARequest("x", 7, str(folder), load_inplace=True)
    assert engine.add_lora(lora) and not engine.add_lora(lora) and engine.list_loras() == {7}
    running = engine.make_request(SHARED, GREEDY, lora)
    engine.enqueue([running])
    for _ in range(4):
        engine.step()
    put(paths[1], folder)
    assert not engine.add_lora(lora), "nothing is read anew unless that is asked for"
    assert engine.add_lora(in_place) and engine.list_loras() == {7}
    [output] = llm.generate([SHARED], GREEDY, lora_request=lora)  # together with the other one
    assert output.outputs[0].token_ids == answers[1] and output.num_cached_tokens == 0
    assert running.finished and running.output().outputs[0].token_ids == answers[0]
    put(paths[0], folder)
    [output] = llm.generate([SHARED], GREEDY, lora_request=in_place)
    assert output.outputs[0].token_ids == answers[0] and output.num_cached_tokens == len(SHARED) - 1
    for path, answer in ((paths[2], answers[2]), (paths[1], answers[1])):
        assert engine.remove_lora(7) and not engine.remove_lora(7) and engine.list_loras() == set()
        [output] = llm.generate([SHARED], GREEDY, lora_request=LoRARequest("y", 7, path))
        assert output.outputs[0].token_ids == answer
    assert output.num_cached_tokens > 0, "the second time for these weights"


def test_dropped_while_it_waits(base, paths, answers, folder):
    """One slot: the new weights wait for those that run, also through preemption, and the old ones are not lost."""
    tight = dict(num_gpu_blocks_override=16, block_size=4, max_model_len=64)
    llm = LLM(str(base), dtype="float32", enable_lora=True, max_loras=1, **tight)
    engine, lora = llm.llm_engine, LoRARequest("x", 1, str(folder))
    old = [engine.make_request(prompt, GREEDY, lora) for prompt in (SHARED, list(range(100, 125)))]
    engine.enqueue(old)
    engine.step()
    engine.remove_lora(1)
    put(paths[1], folder)
    new = engine.make_request(SHARED, GREEDY, lora)
    engine.enqueue([new])
    shutil.rmtree(folder)
    run_to_end(engine)
    assert [old[0].output().outputs[0].token_ids, new.output().outputs[0].token_ids] == answers[:2]
    assert engine.scheduler.num_preemptions > 0


def test_what_is_pinned_stays_in_memory(base, paths, answers, folder):
    llm = LLM(str(base), dtype="float32", enable_lora=True, max_loras=1, **SMALL)
    lora = LoRARequest("x", 1, str(folder))
    expect("no adapter has lora_int_id 1; add_lora() it before", llm.llm_engine.pin_lora, 1)
    llm.llm_engine.add_lora(lora)
    assert llm.llm_engine.pin_lora(1)
    llm.generate([SHARED] * 2, GREEDY, lora_request=[LoRARequest("y", 2, paths[1]), LoRARequest("z", 3, paths[2])])
    shutil.rmtree(folder)
    assert llm.generate([SHARED], GREEDY, lora_request=lora)[0].outputs[0].token_ids == answers[0]
    llm.llm_engine.remove_lora(1)
    expect("adapter 'x'", llm.generate, [SHARED], GREEDY, lora_request=lora)


def test_what_is_refused(base, paths):
    llm = LLM(str(base), **SMALL)
    expect("built without enable_lora=True", llm.llm_engine.add_lora, LoRARequest("x", 1, paths[0]))
    expect("lora_request must be a LoRARequest", llm.llm_engine.add_lora, "x")
    assert llm.llm_engine.list_loras() == set() and not llm.llm_engine.remove_lora(1)
    assert not llm.llm_engine.remove_lora(0) and not llm.llm_engine.remove_lora(-1)
    for change in (llm.llm_engine.remove_lora, llm.llm_engine.pin_lora):
        for number in ([1], "a", None):
            expect("lora_int_id must be a whole number", change, number)


def test_with_asyncio(base, paths, answers):
    lora = LoRARequest("x", 1, paths[0])

    async def ask(llm: AsyncLLM) -> None:
        assert await llm.add_lora(lora) and not await llm.add_lora(lora)
        assert await llm.list_loras() == {1} and await llm.pin_lora(1)
        *_, last = [output async for output in llm.generate(SHARED, GREEDY, lora_request=lora)]
        assert last.outputs[0].token_ids == answers[0]
        assert await llm.remove_lora(1) and not await llm.remove_lora(1)

    with AsyncLLM(str(base), dtype="float32", enable_lora=True, **SMALL) as llm:
        asyncio.run(asyncio.wait_for(ask(llm), 60))


# -- beside requests --------------------------------------------------------------------------------------------------


def meanwhile(monkeypatch, *changes):
    """Let each of these happen while the files of an adapter are read, one at a time."""
    todo, open_adapter = [*changes], Adapter.open

    def opened(*given):
        adapter = open_adapter(*given)
        if todo:
            todo.pop(0)()
        return adapter

    monkeypatch.setattr(Adapter, "open", opened)
    return todo


def answer_of(llm, adapter) -> list[int]:
    return llm.generate([SHARED], GREEDY, lora_request=adapter)[0].outputs[0].token_ids


@pytest.fixture
def llm(base) -> LLM:
    return LLM(str(base), dtype="float32", enable_lora=True, max_loras=1, **SMALL)


def test_a_name_is_resolved_once(llm, paths, answers, folder):
    """What was removed or replaced since stays what it was, and does not come back."""
    known, in_place = llm.engine.known_adapters, LoRARequest("x", 1, str(folder), load_inplace=True)
    llm.llm_engine.add_lora(LoRARequest("x", 1, str(folder)))
    old = known.resolve("x")
    put(paths[1], folder)
    llm.llm_engine.add_lora(in_place)
    new = known.resolve("x")
    assert answer_of(llm, old) == answers[0] and answer_of(llm, new) == answers[1]
    llm.llm_engine.remove_lora(1)
    assert answer_of(llm, new) == answers[1] and answer_of(llm, old) == answers[0]
    assert known.resolve("x") is None and llm.llm_engine.list_loras() == set()


def test_removed_while_it_is_read(llm, paths, answers, monkeypatch):
    """The request that named it has its answer, and the adapter stays removed."""
    remove, known = lambda: llm.llm_engine.remove_lora(1), llm.engine.known_adapters
    todo = meanwhile(monkeypatch, remove)
    assert answer_of(llm, LoRARequest("x", 1, paths[0])) == answers[0]
    assert not todo and known.names == () and known.resolve("x") is None
    llm.llm_engine.add_lora(LoRARequest("x", 1, paths[0]))
    llm.llm_engine.add_lora(LoRARequest("y", 2, paths[1]))  # max_loras=1: x leaves the memory
    todo = meanwhile(monkeypatch, remove)
    assert known.resolve("x") is None and not todo
    llm.llm_engine.add_lora(LoRARequest("x", 1, paths[0]))
    llm.llm_engine.add_lora(LoRARequest("y", 2, paths[1]))
    todo = meanwhile(monkeypatch, remove)
    expect("no adapter has lora_int_id 1", llm.llm_engine.pin_lora, 1)
    assert not todo and known.names == ("y",) and not known._pinned


def test_replaced_while_it_is_read(llm, paths, answers, folder, monkeypatch):
    """A name stands for what it stands for then; nobody is told of files that no longer count."""
    known = llm.engine.known_adapters
    llm.llm_engine.add_lora(LoRARequest("x", 1, str(folder)))
    llm.llm_engine.add_lora(LoRARequest("y", 2, paths[1]))
    entered = []

    def replace_it():
        with known._lock:
            entered.append(known._enter(other, True))

    other = Adapter.open(LoRARequest("x", 1, paths[2]), known.model, known.config)
    todo = meanwhile(monkeypatch, replace_it)
    put(paths[1], folder)
    assert answer_of(llm, known.resolve("x")) == answers[2] and not todo and entered


def test_files_that_are_not_what_was_loaded(llm, paths, folder, caplog):
    """The client hears of the name, the log of the path."""
    known = llm.engine.known_adapters
    for change in (lambda: put(paths[1], folder), lambda: shutil.rmtree(folder)):
        llm.llm_engine.add_lora(LoRARequest("x", 1, str(folder), load_inplace=True))
        llm.llm_engine.add_lora(LoRARequest("y", 2, paths[2]))
        change()
        with pytest.raises(ValueError, match="files of adapter 'x' are not what was loaded") as raised:
            known.resolve("x")
        assert str(folder.parent) not in str(raised.value)
    assert str(folder) in caplog.text


def test_a_search_keeps_its_adapter(llm, paths, folder):
    """Replaced between two of its steps."""
    lora, params = LoRARequest("x", 1, str(folder)), BeamSearchParams(beam_width=2, max_tokens=6)
    [expected] = llm.beam_search([SHARED], params, lora_request=lora)
    llm.reset_prefix_cache()
    put(paths[1], folder)

    def change(*news):
        llm.engine.on_step = None
        llm.llm_engine.add_lora(replace(lora, load_inplace=True))

    llm.engine.on_step = change
    [found] = llm.beam_search([SHARED], params, lora_request=lora)
    assert [beam.tokens for beam in found.sequences] == [beam.tokens for beam in expected.sequences]
    [other] = llm.beam_search([SHARED], params, lora_request=lora)
    assert [beam.tokens for beam in other.sequences] != [beam.tokens for beam in expected.sequences]


# -- the server -------------------------------------------------------------------------------------------------------

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def server(base) -> Iterator[Running]:
    with serving(base, ServeOptions(allow_runtime_lora_updating=True), enable_lora=True, dtype="float32") as running:
        yield running


def post(server: Running, path: str, **body) -> tuple[int, str]:
    status, raw = server.send(path, json.dumps(body).encode())
    return status, raw.decode() if status == 200 else json.loads(raw)["error"]["message"]


def test_endpoints(server, paths, answers, folder):
    client = server.client()

    def answer(name: str) -> list[int]:
        how = {"ignore_eos": True, "return_token_ids": True}
        got = client.completions.create(model=name, prompt=SHARED, temperature=0, max_tokens=12, extra_body=how)
        return got.choices[0].token_ids

    assert post(server, LOAD, lora_name="x", lora_path=str(folder)) == (
        200,
        "Success: LoRA adapter 'x' added successfully.",
    )
    assert [model.id for model in client.models.list()] == ["tiny", "small", "x"]
    assert answer("x") == answers[0]
    status, message = post(server, LOAD, lora_name="x", lora_path=paths[1])
    assert status == 400 and "loaded already; load_inplace: true replaces it" in message
    put(paths[1], folder)
    assert post(server, LOAD, lora_name="x", lora_path=str(folder), load_inplace=True)[0] == 200
    shutil.rmtree(folder)  # it was read, and is not read again
    assert answer("x") == answers[1]
    assert post(server, LOAD, lora_name="y", lora_path=paths[2])[0] == 200
    assert answer("y") == answers[2] and answer("x") == answers[1]
    assert post(server, UNLOAD, lora_name="x", lora_int_id=None) == (
        200,
        "Success: LoRA adapter 'x' removed successfully.",
    )
    assert [model.id for model in client.models.list()] == ["tiny", "small", "y"]
    status, message = post(server, "/v1/completions", model="x", prompt="a")
    assert status == 404 and "body.model is 'x'" in message


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (LOAD, {}, 400, "lora_name must be text"),
        (LOAD, {"lora_name": "x"}, 400, "lora_path must be text"),
        (LOAD, {"lora_name": "tiny", "lora_path": "p"}, 400, "the model itself is served as 'tiny'"),
        (LOAD, {"lora_name": "x", "lora_path": "/nowhere"}, 404, "'/nowhere' is neither a directory"),
        (LOAD, {"lora_name": "x", "lora_path": "BASE"}, 404, "has no adapter_config.json"),
        (LOAD, {"lora_name": "x", "lora_path": "p", "load_inplace": 1}, 400, "load_inplace must be True or False"),
        (LOAD, {"lora_name": "x", "lora_path": "p", "is_3d_lora_weight": True}, 400, "an adapter of experts"),
        (UNLOAD, {}, 400, "lora_name must be text"),
        (UNLOAD, {"lora_name": "x"}, 404, "there is no adapter 'x'; there is none"),
    ],
)
def test_what_the_endpoints_refuse(server, base, path, body, status, message):
    body = {name: str(base) if value == "BASE" else value for name, value in body.items()}
    found, text = post(server, path, **body)
    assert found == status and message in text
    assert not server.engine.list_loras()


@pytest.mark.parametrize("value", [None, "0", "true"])
def test_only_if_allowed(base, paths, monkeypatch, value):
    """By the flag, or by vLLM's variable."""
    if value is not None:
        monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", value)
    with serving(base, enable_lora=True) as server:
        status, message = post(server, LOAD, lora_name="x", lora_path=paths[0])
        assert status == (200 if value == "true" else 404)
        assert status == 200 or "--allow-runtime-lora-updating" in message


@pytest.mark.parametrize("num_rounds", [6, by_night(40)])
def test_replaced_and_unloaded_beside_requests(server, paths, folder, num_rounds):
    """Requests end with 200, or 404 where there is no such adapter at that moment; no path is told, and what was
    unloaded stays so until it is loaded."""
    assert post(server, LOAD, lora_name="kept", lora_path=str(folder))[0] == 200
    found, ends = [], threading.Event()

    def ask(name):
        while not ends.is_set():
            body = {"model": name, "prompt": SHARED, "max_tokens": 2, "temperature": 0}
            found.append((name, *post(server, "/v1/completions", **body)))

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("kept", "comes") * 2]
    for thread in threads:
        thread.start()
    try:
        for number in range(num_rounds):
            put(paths[number % 3], folder)
            assert post(server, LOAD, lora_name="kept", lora_path=str(folder), load_inplace=True)[0] == 200
            assert post(server, LOAD, lora_name="comes", lora_path=paths[number % 2])[0] == 200
            assert post(server, UNLOAD, lora_name="comes")[0] == 200
            assert [model.id for model in server.client().models.list()] == ["tiny", "small", "kept"]
    finally:
        ends.set()
        for thread in threads:
            thread.join()
    assert {(name, status) for name, status, _ in found} <= {("kept", 200), ("comes", 200), ("comes", 404)}
    assert not any(str(folder.parent) in text for _, _, text in found) and len(found) > num_rounds
