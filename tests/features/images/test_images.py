"""Images in prompts, against transformers on the same checkpoint, and what the prefix cache makes of them."""

import random
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint import ModelConfig
from nanovllm.config import EngineConfig
from nanovllm.features.images.prompt_images import Image, PromptImages
from nanovllm.features.images.recent import Recent
from nanovllm.features.parallel.ranks import ParallelRunner
from nanovllm.worker.cpu import c_kernels, threads
from nanovllm.worker.cpu.threads import pytorch_threads
from tests.checkpoints import edit
from tests.image_checkpoints import IDEFICS_PROCESSOR, KINDS, make_image_checkpoint, picture, reference
from tests.marks import by_night

MARKS = {"idefics3": "<image>", "smolvlm": "<image>"}
QWEN_MARK = "<|vision_start|><|image_pad|><|vision_end|>"
OPTIONS = dict(dtype="float32", block_size=4, num_gpu_blocks_override=400, max_model_len=400)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=5)
A, B, C = picture(60, 40), picture(30, 70, 1), picture(32, 32, 2)
BY_DAY = "smolvlm", "qwen3_5"  # kinds whose check at length is made by day
EACH = [kind if kind in BY_DAY else by_night(kind) for kind in KINDS]
THREE = [kind if kind != "idefics3" else by_night(kind) for kind in KINDS]  # by day; smolvlm is an idefics3, nearly


@pytest.fixture(scope="module")
def llm_of(folder_of):
    made: dict[str, LLM] = {}

    def make(kind: str) -> LLM:
        if kind not in made:
            made[kind] = LLM(str(folder_of(kind)), **OPTIONS)
        made[kind].reset_prefix_cache()
        return made[kind]

    return make


def prompt_of(kind: str, *parts: object) -> dict:
    """Texts and pictures."""
    mark = MARKS.get(kind, QWEN_MARK)
    pictures = [part for part in parts if not isinstance(part, str)]
    text = "".join(part if isinstance(part, str) else mark for part in parts)
    return {"prompt": text, "multi_modal_data": {"image": pictures}}


CASES = [
    ("the quick brown ", A, " fox"),
    (A, "the lazy dog"),
    ("what is in ", B),
    ("two gulls ", A, " circled above ", B, " a red boat"),
    (C, B, A, "jumps"),
]


def reference_logits(
    llm: LLM, folder: Path, token_ids: list[int], pictures: list, num_generated: int = GREEDY.max_tokens
) -> torch.Tensor:
    """transformers' at every position: [len(token_ids), vocab_size]. Each picture as our processor has prepared it."""
    processor = llm.engine.image_processor
    images = [processor.prepare(picture, {}) for picture in pictures]
    model, ids = reference(folder), torch.tensor([token_ids])
    inner = model.model
    with torch.no_grad():
        embeddings = model.get_input_embeddings()(ids)
        is_image = ids[0] == llm.engine.model_config.images.image_token_id
        is_image[len(token_ids) - num_generated :] = False  # a generated token is no placeholder
        outputs = [inner.get_image_features(**image.make_inputs(), return_dict=True) for image in images]
        embeddings[0, is_image] = torch.cat([torch.cat(list(output.pooler_output)) for output in outputs])
        if images[0].grid is None:
            hidden = inner.text_model(inputs_embeds=embeddings).last_hidden_state
        else:
            grids = torch.cat([image.make_inputs()["image_grid_thw"] for image in images])
            positions, _ = inner.get_rope_index(ids, is_image[None].int(), image_grid_thw=grids)
            more = {}
            if deepstack := getattr(outputs[0], "deepstack_features", None):
                levels = range(len(deepstack))
                found = [torch.cat([torch.cat(list(o.deepstack_features[i])) for o in outputs]) for i in levels]
                more = {"visual_pos_masks": is_image[None], "deepstack_visual_embeds": found}
            hidden = inner.language_model(inputs_embeds=embeddings, position_ids=positions, **more).last_hidden_state
        return model.lm_head(hidden)[0]


def assert_as_transformers(llm, folder, output, pictures) -> None:
    token_ids = output.prompt_token_ids + output.outputs[0].token_ids
    logprobs = reference_logits(llm, folder, token_ids, pictures).log_softmax(-1)
    first = len(output.prompt_token_ids) - 1
    tolerance = 1e-4 if llm.engine.model_config.hybrid is None else 3e-4  # transformers sums up a state in chunks
    for i, (token_id, entries) in enumerate(zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)):
        row = logprobs[first + i]
        best = row.topk(2).values
        assert token_id == int(row.argmax()) or best[0] - best[1] < 1e-4
        for other, entry in entries.items():
            assert entry.logprob == pytest.approx(float(row[other]), abs=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_transformers(kind, llm_of, folder_of):
    llm = llm_of(kind)
    outputs = llm.generate([prompt_of(kind, *case) for case in CASES], GREEDY, use_tqdm=False)  # in one batch
    for case, output in zip(CASES, outputs, strict=True):
        assert_as_transformers(llm, folder_of(kind), output, [part for part in case if not isinstance(part, str)])


@pytest.mark.parametrize("kind", THREE)
def test_chunks_that_end_inside_an_image(kind, folder_of):
    """They give the same bits as a prompt in one chunk, whether their size divides the block's or not."""
    prompt = prompt_of(kind, "two gulls ", A, " circled above ", C)
    expected = None
    for size in (400, 1, 5, 23):
        llm = LLM(str(folder_of(kind)), **OPTIONS | {"max_num_batched_tokens": size, "num_gpu_blocks_override": 100})
        [output] = llm.generate(prompt, GREEDY, use_tqdm=False)
        found = output.prompt_token_ids, output.outputs[0].token_ids, output.outputs[0].logprobs
        expected = expected or found
        assert found == expected, f"chunks of {size}"
        assert llm.stats()["images"]["tower_runs"] == 2, "each image once, however many chunks it is in"


@pytest.mark.parametrize("dtype", ["bfloat16", by_night("float16")])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_tower_of_16_bits_keeps_in_32(kind, dtype, folder_of):
    """Frequencies of rotary embedding, for example: each buffer has the dtype and the numbers of transformers'."""
    folder = folder_of(kind)
    llm = LLM(str(folder), **OPTIONS | {"dtype": dtype})
    llm.generate(prompt_of(kind, A), SamplingParams(max_tokens=1), use_tqdm=False)
    found = dict(llm.engine.model_runner.parts["tower"]._model.named_buffers())
    theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).model.named_buffers()
    expected = {name: buffer for name, buffer in theirs if not name.startswith(("language_model.", "text_model."))}
    assert found.keys() == expected.keys()
    for name, buffer in expected.items():
        assert found[name].dtype == buffer.dtype and torch.equal(found[name], buffer), name


def test_the_prompt_of_transformers_processor(folder_of, llm_of):
    """Placeholders, rows and columns of a picture that is cut into parts, as Idefics3Processor writes them."""
    llm = llm_of("idefics3")
    pil = Idefics3ImageProcessorPil(**IDEFICS_PROCESSOR)
    theirs = Idefics3Processor(pil, llm.get_tokenizer(), image_seq_len=4)
    for case in CASES:
        prompt = prompt_of("idefics3", *case)
        expected = theirs(text=[prompt["prompt"]], images=[prompt["multi_modal_data"]["image"]])
        [output] = llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
        assert output.prompt_token_ids == expected["input_ids"][0]


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5"])
def test_positions_of_transformers(kind, folder_of):
    """Of random images in random places, and of tokens beyond the prompt."""
    rng, model = random.Random(0), reference(folder_of(kind)).model
    for _ in range(50):
        types, places, grids = [], [], []
        for _ in range(rng.randint(1, 3)):
            types += [0] * rng.randint(0 if not types else 1, 5)
            height, width = rng.randint(1, 5), rng.randint(1, 5)
            places.append(tuple(range(len(types), len(types) + height * width)))
            types += [1] * (height * width)
            grids.append([1, 2 * height, 2 * width])
        types += [0] * rng.randint(1, 4)
        ids = torch.zeros(1, len(types), dtype=torch.long)
        expected, delta = model.get_rope_index(ids, torch.tensor([types]), image_grid_thw=torch.tensor(grids))
        images = tuple(Image("", dict, 0, grid=(grid[1] // 2, grid[2] // 2)) for grid in grids)
        ours = PromptImages(images, tuple(places))
        start = rng.randrange(len(types))
        assert ours.positions(0, len(types)) == list(map(tuple, expected[:, 0].T.tolist()))
        assert ours.positions(start, len(types)) == ours.positions(0, len(types))[start:]
        after = len(types) + int(delta)
        assert ours.positions(len(types), len(types) + 2) == [(after,) * 3, (after + 1,) * 3]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_picture_again(kind, llm_of):
    """Its K/V is reused and the tower does not run; in another place of a prompt the tower's vectors are."""
    llm = llm_of(kind)
    prompt = prompt_of(kind, "what is in ", A, " the quick brown fox")
    [cold] = llm.generate(prompt, GREEDY, use_tqdm=False)
    runs = llm.stats()["images"]["tower_runs"]
    [warm] = llm.generate(prompt_of(kind, "what is in ", A.copy(), " the quick brown fox"), GREEDY, use_tqdm=False)
    assert warm.outputs == cold.outputs
    assert warm.num_cached_tokens >= len(cold.prompt_token_ids) - 8
    llm.generate(prompt_of(kind, "the lazy dog and ", A), GREEDY, use_tqdm=False)
    assert llm.stats()["images"]["tower_runs"] == runs


@pytest.mark.parametrize("kind", KINDS)
def test_one_pixel(kind, llm_of, folder_of):
    """Everything before the first block that overlaps the picture is shared, and nothing after it."""
    llm = llm_of(kind)
    other = A.copy()
    other.putpixel((0, 0), tuple(255 - value for value in A.getpixel((0, 0))))
    text = "the quick brown fox jumps over the lazy dog "
    [first] = llm.generate(prompt_of(kind, text, A, " two gulls"), GREEDY, use_tqdm=False)
    [second] = llm.generate(prompt_of(kind, text, other, " two gulls"), GREEDY, use_tqdm=False)
    start = llm.engine.make_request(prompt_of(kind, text, A), GREEDY).samples[0].seq.mm_spans[0].start
    assert first.prompt_token_ids == second.prompt_token_ids
    if kind != "qwen3_5":  # a hybrid model begins where a snapshot is
        assert second.num_cached_tokens == start // 4 * 4
    assert second.num_cached_tokens <= start
    assert_as_transformers(llm, folder_of(kind), second, [other])


@pytest.mark.parametrize("kind", BY_DAY)
@pytest.mark.parametrize("options", [{}, {"cpu_cache_bytes": 1 << 24}, {"prefix_cache_dir": True}, "forgetful"])
def test_whatever_runs_beside_it(kind, options, folder_of, tmp_path, monkeypatch):
    """Random prompts, in a pool too small for all, chunked, preempted, cached and aborted: each as it is alone.

    forgetful: neither processor nor tower keeps more than the newest image.
    """
    if options == "forgetful":
        monkeypatch.setattr(Recent, "max_bytes", 0)
        options = {}
    check_random_prompts(folder_of(kind), kind, 25, options, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_runs_beside_it_at_length(kind, folder_of, tmp_path):
    check_random_prompts(folder_of(kind), kind, 130, {"cpu_cache_bytes": 1 << 24}, tmp_path)


@cache
def random_prompts(folder: Path, kind: str, number: int) -> tuple[list, list, list]:
    """Prompts, their parameters, and what an engine answers that has one at a time and keeps nothing."""
    rng = random.Random(number)
    texts = ["the quick ", "brown fox ", "jumps over the lazy dog ", "two gulls circled "]
    pictures = [A, B, C, picture(50, 50, 3)]
    prompts = []
    for _ in range(number):
        parts = [rng.choice(texts)]
        for _ in range(rng.randint(0, 2)):
            parts += [rng.choice(pictures), rng.choice(texts)]
        prompts.append(prompt_of(kind, *parts))
        if rng.random() < 0.3:
            prompts[-1]["cache_salt"] = rng.choice(["x", "y"])
    params = [
        SamplingParams(temperature=0.9, max_tokens=rng.randint(1, 8), ignore_eos=True, seed=i) for i in range(number)
    ]
    alone = LLM(str(folder), **OPTIONS | {"enable_prefix_caching": False})
    expected = [alone.generate(*pair, use_tqdm=False)[0].outputs for pair in zip(prompts, params, strict=True)]
    return prompts, params, expected


def check_random_prompts(folder, kind, number, options, tmp_path) -> None:
    rng = random.Random(number)
    prompts, params, expected = random_prompts(folder, kind, number)
    num_engines = 1
    if "prefix_cache_dir" in options:
        options = {"prefix_cache_dir": str(tmp_path / "cache")}
        num_engines = 2  # the second one finds what the first has left on the disk
    small = OPTIONS | {"num_gpu_blocks_override": 100, "max_num_batched_tokens": 19} | options
    for _ in range(num_engines):
        llm = LLM(str(folder), **small)
        engine = llm.engine
        requests = [engine.make_request(*pair) for pair in zip(prompts, params, strict=True)]
        engine.enqueue(requests)
        aborted = set(rng.sample(range(number), number // 8))
        for step in range(10_000):
            if not engine.has_unfinished_requests():
                break
            engine.step()
            if step == 3:
                engine.abort_requests([requests[i] for i in aborted])
            engine.scheduler.check_integrity()
        for i, request in enumerate(requests):
            if i not in aborted:
                assert request.output().outputs == expected[i], f"prompt {i}"


def test_a_directory_that_another_processor_has_filled(folder_of, tmp_path):
    """What it keeps of a picture is not found after the processor's fields have changed."""
    folder = shutil.copytree(folder_of("smolvlm"), tmp_path / "model")
    prompt, options = (
        prompt_of("smolvlm", "what is ", A, " fox"),
        OPTIONS | {"prefix_cache_dir": str(tmp_path / "cache")},
    )

    def ask(**more) -> tuple[int, list[int]]:
        [output] = LLM(str(folder), **OPTIONS | more).generate(prompt, GREEDY, use_tqdm=False)
        return output.num_cached_tokens, output.outputs[0].token_ids

    first, again = ask(**options), ask(**options)
    assert first[0] == 0 and again[0] > 20 and first[1] == again[1]
    edit(folder / "preprocessor_config.json", image_mean=[0.1, 0.2, 0.3])
    assert ask(**options) == ask() and ask()[0] == 0


@pytest.mark.parametrize("kind", EACH)
def test_fewer_bits_and_samples(kind, folder_of):
    """int8 of the language model, draft tokens and n > 1 work with images."""
    options = dict(quantization="int8", speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    llm = LLM(str(folder_of(kind)), **OPTIONS | options)
    params = SamplingParams(n=2, max_tokens=6, seed=1, ignore_eos=True)
    prompts = [prompt_of(kind, "the quick ", A, "the quick"), prompt_of(kind, "the quick ", B, "the quick")]
    together = llm.generate(prompts, params, use_tqdm=False)
    plain = LLM(str(folder_of(kind)), **OPTIONS | {"quantization": "int8"})
    for prompt, output in zip(prompts, together, strict=True):
        assert plain.generate(prompt, params, use_tqdm=False)[0].outputs == output.outputs


@pytest.mark.compiler
@pytest.mark.parametrize("kind", ["smolvlm", *(by_night(kind) for kind in KINDS if kind != "smolvlm")])
def test_the_number_of_threads(kind, tmp_path):
    """An image's vectors have the same bits with any number, and a disk finds what an engine with others has left.

    (Of a layer with 173 numbers a row, PyTorch computes GELU of those that fill no vector in another way, and which
    these are depends on where a thread's share of the rows ends.)
    """
    folder = make_image_checkpoint(tmp_path / "model", kind, vision={"intermediate_size": 173})
    prompt = prompt_of(kind, "in ", picture(200, 100), " fox")
    for dtype in ("float32", "bfloat16"):
        options = OPTIONS | {"dtype": dtype, "prefix_cache_dir": str(tmp_path / dtype)}
        found = []
        for num_threads in (1, 2, 3):
            llm = LLM(str(folder), **options)
            assert llm.stats()["batch_invariant"].endswith("; images: on processors like this one")
            with pytorch_threads(num_threads):
                [output] = llm.generate(prompt, GREEDY, use_tqdm=False)
                assert (output.num_cached_tokens > 0) == (num_threads > 1)
                [tower, image] = llm.engine.model_runner.parts["tower"], image_of(llm, prompt)
                found.append(tower._run(image))
                assert torch.get_num_threads() == num_threads
            llm.engine.tiers.disk.close()
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2]), dtype


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}], ids=["default", "eager"])
@pytest.mark.parametrize("kind", BY_DAY)
def test_without_a_compiler(kind, options, folder_of, monkeypatch):
    """PyTorch looks at images, too."""

    def none() -> None:
        raise FileNotFoundError("there is no C compiler")

    for module in (c_kernels, threads):
        monkeypatch.setattr(module, "load_pool", none)
    llm = LLM(str(folder_of(kind)), **OPTIONS | options)
    [output] = llm.generate(prompt_of(kind, "the quick ", A, " fox"), GREEDY, use_tqdm=False)
    assert_as_transformers(llm, folder_of(kind), output, [A])


def image_of(llm: LLM, prompt: dict) -> Image:
    """A prompt's one picture, as the tower sees it."""
    return llm.engine.image_processor.prepare(prompt["multi_modal_data"]["image"][0], {})


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["smolvlm", "qwen3_vl"])
def test_ranks(kind, folder_of, processes):
    """stats() says what they have looked at, and needs no answer of theirs: it may be called at any time."""
    one, two = LLM(str(folder_of(kind)), **OPTIONS), processes.llm(folder_of(kind), 2, **OPTIONS)
    prompts = [prompt_of(kind, "in ", A, " fox"), prompt_of(kind, B, "two ", A)]
    assert "images" not in two.stats()
    found, expected = (llm.generate(prompts, GREEDY, use_tqdm=False) for llm in (two, one))
    assert [output.outputs[0].token_ids for output in found] == [output.outputs[0].token_ids for output in expected]
    counts = one.stats()["images"]
    assert counts["tower_runs"] == 2 and counts["tower_bytes"] > 10_000
    assert two.stats()["images"] == counts | {"tower_bytes": 2 * counts["tower_bytes"]}
    two.engine.model_runner._end()
    assert two.stats()["images"]["tower_runs"] == 2


def test_what_ranks_count(llm_of, folder_of, monkeypatch):
    """Each image once, the towers of all ranks; stats() asks nobody. Here the ranks are a stub's."""
    llm, folder = llm_of("smolvlm"), folder_of("smolvlm")
    config = EngineConfig(model=str(folder), tensor_parallel_size=2, load_format="dummy")
    runner = ParallelRunner(config, ModelConfig.from_directory(folder))
    runner.batch_invariant = llm.stats()["batch_invariant"]  # which stats() tells, too
    answers = {
        ("load_part", "tower"): [None, None],
        ("get", "part_counts"): [{"tower": {"tower_runs": 5, "tower_bytes": size}} for size in (100, 120)],
    }
    monkeypatch.setattr(runner, "_ask", lambda *message: answers[message])
    monkeypatch.setattr(llm.engine, "model_runner", runner)
    assert "images" not in llm.stats()
    runner.load_part("tower")
    answers.clear()
    assert llm.stats()["images"] == {"tower_runs": 5, "tower_bytes": 220}
