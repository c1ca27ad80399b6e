"""A page's model: the engine's tokens, in WebAssembly. A tiny checkpoint, with the demo model's heads and formats."""

import json
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from chapters.ch13_guess_and_check.world import Always
from chapters.site import runtime
from chapters.site.model import files
from chapters.site.model.engine import PageEngine
from chapters.site.model.lessons import begin_lesson
from nanovllm import LLM, SamplingParams
from nanovllm.core.sequence import Sequence
from nanovllm.worker.sampler import SamplingBatch, sample
from tests.course.course_text import ROOT
from tests.course.page_checkpoint import make_page_checkpoint

TEXT = "the quick brown fox jumps over the lazy dog. "
PROMPTS = ["a", TEXT, TEXT * 2 + "the quick", "two gulls circled above a red boat in the fog\n" * 12]


@pytest.fixture(scope="module")
def checkpoint_file(tmp_path_factory) -> Path:
    return make_page_checkpoint(tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def folder(checkpoint_file) -> Path:
    """What lies beside the pages."""
    folder = checkpoint_file.with_name("model")
    try:
        files.write_model(folder, str(checkpoint_file))
    except (runtime.MissingRuntime, files.MissingCompiler) as error:
        pytest.skip(str(error))
    return folder


class Model:
    """What worker.js registers as page_model, in Node."""

    def __init__(self, folder: Path) -> None:
        command = ["node", str(Path(__file__).with_name("page_model.mjs")), str(folder)]
        self.node = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.layout = (folder / "layout.json").read_text("utf-8")

    def __getattr__(self, name: str) -> Callable[[str], str]:
        def ask(text: str) -> str:
            self.node.stdin.write(json.dumps([name, text]) + "\n")
            self.node.stdin.flush()
            return json.loads(self.node.stdout.readline())

        return ask

    def close(self) -> None:
        self.node.stdin.close()
        assert self.node.wait(10) == 0


@pytest.fixture(scope="module")
def model(folder) -> Iterator[Model]:
    if shutil.which("node") is None:
        pytest.skip("no node: apt install nodejs")
    model = Model(folder)
    yield model
    model.close()


@pytest.fixture(scope="module")
def llm(checkpoint_file) -> LLM:
    return LLM(str(checkpoint_file), **files.OPTIONS)


def generate(engine: PageEngine, token_ids: list[int], params: SamplingParams) -> tuple[list[int], int]:
    """(tokens, how many of the prompt's were found in the prefix cache)"""
    seq, ended = engine.begin(token_ids, params), []
    while not ended:
        engine.compute(wants_logits=params.temperature > 0)
        ended = engine.take(engine.sample())
    engine.scheduler.check_integrity()
    return seq.generated_token_ids, seq.num_cached_tokens


class HalfRight:
    """Proposes what will be said, and then, after two tokens, something else."""

    answer: list[int]

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [
            [*self.answer[seq.num_generated_tokens :][:2], 7, 7][:num_draft_tokens] for seq, num_draft_tokens in wanted
        ]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("has_drafts", [False, True], ids=["alone", "drafts"])
def test_tokens_are_the_engines(model, llm, temperature, has_drafts):
    """Cold, from the prefix cache, in chunks of 64, with draft tokens; greedy and drawn."""
    engine, params = (
        PageEngine(json.loads(model.layout), model.step),
        SamplingParams(temperature=temperature, seed=7, max_tokens=24),
    )
    proposer = HalfRight()
    engine.speculation = Always(proposer, 4, 64) if has_drafts else None
    llm.reset_prefix_cache()
    cached = []
    for prompt in [*PROMPTS, *PROMPTS]:
        [output] = llm.generate([prompt], params, use_tqdm=False)
        proposer.answer = output.outputs[0].token_ids
        token_ids, num_cached = generate(engine, output.prompt_token_ids, params)
        assert token_ids == output.outputs[0].token_ids
        assert num_cached == output.num_cached_tokens
        cached.append(num_cached)
    assert cached[0] == cached[1] == 0 and cached[-1] > 64


def test_attention_is_the_models(model, llm, checkpoint_file):
    """transformers computes with the same weights, unpacked; the engine rounds what meets them to 8 bits."""
    token_ids = llm.get_tokenizer()(TEXT).input_ids
    engine = PageEngine(json.loads(model.layout), model.step)
    engine.begin(token_ids, SamplingParams(max_tokens=2))
    engine.compute()
    options = dict(gguf_file=checkpoint_file.name, dtype=torch.float32, attn_implementation="eager")
    peer = AutoModelForCausalLM.from_pretrained(checkpoint_file.parent, **options)
    expected = peer(torch.tensor([token_ids]), output_attentions=True).attentions
    for layer in range(2):
        weights = torch.tensor(engine.attention(layer))  # [heads, tokens]
        difference = (weights - expected[layer][0, :, -1]).abs()
        assert difference.max() < 0.1 and difference.mean() < 0.01, layer
    assert engine.take([5]) == [] and engine.compute().chosen, "the pending step is as it was"


def test_words_are_the_tokenizers(model, folder, demo_checkpoint, tmp_path):
    """Lines of the course, and any characters, as transformers cuts and joins them."""
    folder = shutil.copytree(folder, tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(demo_checkpoint / name, folder / name)
    tokenizer, numbers = AutoTokenizer.from_pretrained(demo_checkpoint), random.Random(0)
    texts = ["<|im_start|>user\nHi there<|im_end|>", *(ROOT / "README.md").read_text("utf-8").splitlines(keepends=True)]
    odd = [
        *map(chr, range(32, 0x250)),
        *" \t\n\r 0123456789",
        "\u3042\u65e5\u672c",
        "\U0001f40d",
        "e\u0301",
        "\u200b",
        "don't",
    ]
    texts += ["".join(numbers.choices(odd, k=numbers.randrange(1, 40))) for _ in range(200)]
    page = Model(folder)
    for text in filter(None, texts):
        token_ids = json.loads(page.encode(text))
        assert token_ids == tokenizer(text).input_ids, repr(text)
        assert page.decode(json.dumps(token_ids)) == tokenizer.decode(token_ids), repr(text)
    page.close()


def test_lessons_say_what_was_wrong(model):
    """A mistake is told, and the text that was there goes on."""
    lesson = begin_lesson(1, model)
    values = {"text": "a red boat", "temperature": "1", "layer": "1", "head": "1"}
    lesson.do("begin", values)
    with pytest.raises(ValueError, match="at least one letter"):
        lesson.do("begin", values | {"text": ""})
    with pytest.raises(ValueError, match="1 to 1023 tokens"):
        lesson.do("begin", values | {"text": "a b" * 2000})
    before = len(lesson.seq.tokens)
    lesson.do("likely", values)
    assert len(lesson.seq.tokens) == before + 1
    full = json.dumps(json.loads(model.layout) | {"max_model_len": before + 2})
    small = begin_lesson(1, SimpleNamespace(layout=full, step=model.step, encode=model.encode, decode=model.decode))
    small.do("begin", values)
    small.do("likely", values)
    for act in ("likely", "change", "draw", "pick"):
        with pytest.raises(ValueError, match="fills this page's memory"):
            small.do(act, values | {"pick": "5"})
    german = lesson.do("begin", values | {"language": "de"})
    assert "im Prefix-Cache. Der letzte Schritt: " in german["said"] and german["panels"][0][0] == "Was folgen kann"


def test_draws_are_the_samplers(model):
    """The engine's own sampler takes the same tokens of the same logits."""
    lesson = begin_lesson(8, model)
    values = {"text": TEXT, "temperature": "1.5", "min_p": "0.02", "top_k": "20", "top_p": "0.8"}
    lesson.do("begin", values)
    assert lesson.do("draw", values)["said"].startswith("200 drawn, with seeds 0 to 199.")
    seqs = [Sequence([0], replace(lesson.params, seed=seed)) for seed in range(200)]
    token_ids, _ = sample(torch.tensor([lesson.logits]).repeat(200, 1), SamplingBatch.from_sequences(seqs))
    assert lesson.drawn == Counter(token_ids) and 1 < len(lesson.drawn) <= lesson.shape.num_left < 20
    values |= {"temperature": "1", "min_p": "0", "top_k": "2", "top_p": "1"}
    assert lesson.do("change", values)["said"].startswith("2 of 320 tokens are left: top_k cuts 318.")
