"""lm-eval's own clients score and generate over HTTP, and find what its own backend, transformers, finds.

lm-eval brings a hundred packages, so no extra has it: pip install "lm-eval[api]" before these tests. Eight minutes,
most of them in transformers.
"""

import builtins
import inspect
import json
import random

import numpy as np
import pytest

from nanovllm.serving.http.options import ServeOptions
from tests.servers import serving

lm_eval = pytest.importorskip("lm_eval", reason='needs lm-eval: pip install "lm-eval[api]"')

NUM_ITEMS = 50
METRICS = {  # task -> what is compared
    "endings": ("acc,none", "acc_norm,none"),
    "texts": ("bits_per_byte,none", "word_perplexity,none"),
    "sums": ("exact_match,number",),
    "questions": ("exact_match,number",),
}
GENERATED = dict(
    output_type="generate_until",
    doc_to_target="{{a + b}}",
    generation_kwargs={"until": ["\n"], "max_gen_toks": 12, "do_sample": False},
    filter_list=[
        dict(name="number", filter=[dict(function="regex", regex_pattern=r"(\d+)\D*$"), dict(function="take_first")])
    ],
)
TASKS = {
    "endings": dict(
        output_type="multiple_choice", doc_to_text="{{text}}", doc_to_choice="choices", doc_to_target="right"
    ),
    "texts": dict(output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}"),
    "sums": GENERATED | dict(doc_to_text="2 + 2 = 4\n5 + 3 = 8\n{{a}} + {{b}} ="),
    "questions": GENERATED | dict(doc_to_text="What is {{a}} plus {{b}}? Reply with the number."),
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> dict[str, dict]:
    """As users of lm-eval write theirs. Their data is what Python says of its own functions, and numbers."""
    rng, folder = random.Random(0), tmp_path_factory.mktemp("items")
    docs = [inspect.getdoc(value) or "" for _, value in sorted(vars(builtins).items())]
    texts = [doc.split("\n\n")[0] for doc in dict.fromkeys(docs) if doc.count(" ") > 5][:NUM_ITEMS]
    endings = [" ".join(text.split()[-3:]) for text in texts]
    items = []
    for number, (text, ending) in enumerate(zip(texts, endings, strict=True)):
        choices = rng.sample([other for other in endings if other != ending], 3)
        choices.insert(number % 4, ending)
        items.append({"text": " ".join(text.split()[:-3]), "choices": choices, "right": number % 4})
    numbers = [{"a": rng.randrange(1, 10), "b": rng.randrange(1, 10)} for _ in range(NUM_ITEMS)]
    rows = {"endings": items, "texts": [{"text": text} for text in texts], "sums": numbers, "questions": numbers}
    found = {}
    for name, task in TASKS.items():
        assert len(rows[name]) == NUM_ITEMS
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        data = dict(dataset_path="json", dataset_kwargs={"data_files": {"test": str(file)}}, test_split="test")
        metrics = [{"metric": metric.split(",")[0]} for metric in METRICS[name]]
        found[name] = dict(task=name, metric_list=metrics) | data | task
    return found


@pytest.fixture(scope="module")
def server(demo_checkpoint):
    options = ServeOptions(enable_tokenizer_info_endpoint=True)
    engine = dict(dtype="float32", num_gpu_blocks_override=800, max_model_len=2048, max_num_batched_tokens=2048)
    with serving(demo_checkpoint, options, names=("demo",), **engine) as running:
        yield running


def evaluate(model: str, args: dict, tasks: list[dict], **options) -> dict:
    """{task: {metric: its value}}, {task: what came for each item}"""
    found = lm_eval.simple_evaluate(model, model_args=args, tasks=tasks, bootstrap_iters=0, **options)
    values = {name: {metric: found["results"][name][metric] for metric in METRICS[name]} for name in found["results"]}
    return values, {
        name: [sample["filtered_resps"] for sample in sorted(samples, key=lambda one: one["doc_id"])]
        for name, samples in found["samples"].items()
    }


def compare(ours: tuple[dict, dict], theirs: tuple[dict, dict]) -> None:
    (values, items), (expected_values, expected_items) = ours, theirs
    print(values, expected_values)
    for name in expected_values:
        assert values[name] == pytest.approx(expected_values[name], rel=1e-4)
        if TASKS[name]["output_type"] == "generate_until":
            assert items[name] == expected_items[name]
            continue
        for own, other in zip(items[name], expected_items[name], strict=True):
            assert np.array(own, float) == pytest.approx(np.array(other, float), rel=1e-4)  # with is_greedy


def hf(demo_checkpoint) -> dict:
    return dict(pretrained=str(demo_checkpoint), dtype="float32", device="cpu", batch_size=1)


def test_completions(server, demo_checkpoint, tasks):
    """Endings are chosen, texts surprise, sums are done. The tokenizer is the server's: /tokenizer_info, /tokenize."""
    tasks = [tasks[name] for name in ("endings", "texts", "sums")]
    theirs = evaluate("hf", hf(demo_checkpoint), tasks)
    assert 0.5 < theirs[0]["endings"]["acc,none"] < 1 and 0.5 < theirs[0]["sums"]["exact_match,number"] < 1
    for batch_size in (1, 16):
        args = dict(model="demo", base_url=f"{server.url}/v1/completions", num_concurrent=4, batch_size=batch_size)
        compare(evaluate("local-completions", args, tasks), theirs)


def test_chat_completions(server, demo_checkpoint, tasks):
    args = dict(model="demo", base_url=f"{server.url}/v1/chat/completions", num_concurrent=4)
    ours = evaluate("local-chat-completions", args, [tasks["questions"]], apply_chat_template=True)
    theirs = evaluate("hf", hf(demo_checkpoint), [tasks["questions"]], apply_chat_template=True)
    assert 0.5 < theirs[0]["questions"]["exact_match,number"] < 1
    compare(ours, theirs)
