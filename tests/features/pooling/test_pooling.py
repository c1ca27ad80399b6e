"""Embeddings and scores are transformers': alone, in a batch, cut into chunks, with a cached prefix."""

import json
import shutil
from copy import copy
from functools import partial

import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification

from nanovllm import LLM, LoRARequest, PoolingParams, SamplingParams
from nanovllm.config import EngineConfig, PoolerConfig
from nanovllm.features.pooling.cutting import Cut
from nanovllm.features.pooling.outputs import PoolingOutput
from nanovllm.features.pooling.scoring import INSTRUCTION, QWEN3_RERANKER
from tests.checkpoints import SMALL, VARIANTS, edit, make_tokenizer, reference_model
from tests.errors import expect
from tests.gguf_files import write_gguf
from tests.marks import by_night

INSTRUCT = "Instruct: find the text that answers\nQuery: "
TEXTS = [INSTRUCT + "two gulls", INSTRUCT + "the quick brown fox", INSTRUCT + "a red boat in the fog over the lazy dog"]
YES_NO = {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}
RERANKER = {"architectures": ["Qwen3ForSequenceClassification"], **YES_NO}


@torch.inference_mode()
def reference_states(folder, token_ids):
    """transformers' last hidden state of the last token."""
    return reference_model(folder).model(torch.tensor([token_ids])).last_hidden_state[0, -1]


def normed(x):
    return x / x.norm()


def vector(output):
    return torch.tensor(output.outputs.embedding)


def make(folder, **options):
    return LLM(str(folder), **{"runner": "pooling", **SMALL, **options})


@pytest.fixture(scope="module")
def llm(checkpoint):
    llm = make(checkpoint("qwen3"))
    yield llm
    llm.engine.scheduler.check_integrity()
    assert len(llm.engine.block_manager.free_blocks) == 160, "a block was not given back"


@pytest.fixture(scope="module")
def embedder(checkpoint, tmp_path_factory):
    """As Qwen3-Embedding's files may be: no output head, no prefix before the names, sentence-transformers' files."""
    folder = tmp_path_factory.mktemp("embedder")
    AutoModel.from_pretrained(checkpoint("qwen3"), dtype=torch.float32).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    names = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [{"path": path, "type": f"sentence_transformers.models.{name}"} for path, name in names]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


@pytest.fixture(scope="module")
def yes_no(checkpoint, tmp_path_factory):
    """A language model whose tokenizer knows yes and no as one token each, as Qwen3-Reranker's."""
    folder = shutil.copytree(checkpoint("qwen3"), tmp_path_factory.mktemp("reranker") / "model")
    tokenizer = make_tokenizer()
    path = folder / "tokenizer.json"
    tokenizer.save_pretrained(folder)
    state = json.loads(path.read_text())
    for token_id, word in ((318, "no"), (319, "yes")):
        state["model"]["vocab"] = {w: i for w, i in state["model"]["vocab"].items() if i != token_id} | {word: token_id}
    state["model"]["merges"] = [pair for pair in state["model"]["merges"] if "".join(pair) in state["model"]["vocab"]]
    path.write_text(json.dumps(state))
    return folder


@pytest.fixture(scope="module")
def classifier(checkpoint, tmp_path_factory):
    """make(num_labels) -> a checkpoint with a score head."""

    def made(num_labels):
        folder = tmp_path_factory.mktemp(f"classifier-{num_labels}")
        torch.manual_seed(1)
        options = dict(num_labels=num_labels, pad_token_id=None, dtype=torch.float32)
        model = AutoModelForSequenceClassification.from_pretrained(checkpoint("qwen3"), **options)
        model.save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
        return folder, model.eval()

    return made


# -- embeddings -------------------------------------------------------------------------------------------------------


OTHERS = """llama-biases llama-mha-tied llama-linear-rope llama-llama3-rope mistral qwen2-window qwen3-yarn
qwen3-moe-not-normalized""".split()  # layers of kinds that others have, in other numbers


@pytest.mark.parametrize("variant", [by_night(variant) if variant in OTHERS else variant for variant in VARIANTS])
def test_every_architecture(checkpoint, variant):
    """Hybrid models, windows, experts: whatever the layers are."""
    folder = checkpoint(variant)
    small = {k: v for k, v in SMALL.items() if k != "num_gpu_blocks_override"}
    llm = make(folder, **small, kv_cache_memory_bytes=1 << 22)
    for output in llm.embed(TEXTS, use_tqdm=False):
        expected = normed(reference_states(folder, output.prompt_token_ids))
        assert torch.allclose(vector(output), expected, atol=1e-5)
        assert (output.finished, output.error) == (True, None)
    again = llm.embed(TEXTS[:1], use_tqdm=False)[0]
    assert again.num_cached_tokens > 0
    assert torch.allclose(vector(again), normed(reference_states(folder, again.prompt_token_ids)), atol=1e-5)


@pytest.mark.compiler
@pytest.mark.parametrize(
    "options", [{"max_num_batched_tokens": 5}, {"num_gpu_blocks_override": 25}, {"max_num_seqs": 1}]
)
def test_the_same_bits_in_any_company(checkpoint, llm, options):
    """Chunks, a pool that holds few, one at a time; alone, and with all that comes before it in the cache."""
    alone = []
    for text in TEXTS:
        llm.reset_prefix_cache()
        alone += llm.embed(text, use_tqdm=False)
    other = make(checkpoint("qwen3"), **{**options, "max_model_len": 64})
    texts = TEXTS * 3
    outputs = other.embed(texts, use_tqdm=False)
    assert [output.outputs for output in outputs] == [output.outputs for output in alone] * 3
    assert other.embed(texts, use_tqdm=False)[0].outputs == alone[0].outputs
    other.engine.scheduler.check_integrity()
    assert other.stats()["num_output_tokens"] == 0


def test_an_instruction_is_computed_once(llm):
    llm.reset_prefix_cache()
    outputs = llm.embed(TEXTS, use_tqdm=False)
    shared = len(llm.get_tokenizer()(INSTRUCT).input_ids) // 4 * 4
    assert sorted(output.num_cached_tokens for output in outputs) == [0, shared, shared]
    [output] = llm.embed([TEXTS[2]], use_tqdm=False)
    before = llm.stats()["num_prefill_tokens"]
    full = output.prompt_token_ids[: len(output.prompt_token_ids) // 4 * 4]  # whole blocks: all of it is cached
    llm.embed([full], use_tqdm=False)
    [cached] = llm.embed([full], use_tqdm=False)
    assert cached.num_cached_tokens == len(full) - 1
    assert llm.stats()["num_prefill_tokens"] == before + 2, "of a cached prompt one token is computed"


def test_salts_keep_tenants_apart(llm):
    llm.reset_prefix_cache()
    prompts = [{"prompt": TEXTS[0], "cache_salt": salt} for salt in "ab"]
    assert [output.num_cached_tokens for output in llm.embed(prompts, use_tqdm=False)] == [0, 0]


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_fewer_bits(checkpoint, llm, bits):
    outputs = make(checkpoint("qwen3"), quantization=bits, convert="embed", runner="auto").embed(TEXTS, use_tqdm=False)
    exact = llm.embed(TEXTS, use_tqdm=False)
    for output, other in zip(outputs, exact, strict=True):
        assert vector(output).dot(vector(other)) > (0.99 if bits == "int8" else 0.8)
        assert vector(output).norm().item() == pytest.approx(1.0)


@pytest.mark.compiler
def test_no_output_head_and_no_prefix(embedder, llm):
    """runner="auto" sees what the checkpoint is made for."""
    loaded = LLM(str(embedder), **SMALL)
    assert [output.outputs for output in loaded.embed(TEXTS)] == [output.outputs for output in llm.embed(TEXTS)]
    assert not hasattr(loaded.engine.model_runner.model.lm_head, "weight")
    expect("runner='pooling', with which this model was loaded, samples no tokens", loaded.generate, "x")
    expect("runner='pooling', with which", loaded.chat, [{"role": "user", "content": "x"}])
    expect("Qwen3Model, has no output head, so it cannot generate", LLM, str(embedder), runner="generate")


def test_what_is_asked(checkpoint, llm):
    raw = llm.embed(TEXTS[0], pooling_params=PoolingParams(use_activation=False))[0]
    state = reference_states(checkpoint("qwen3"), raw.prompt_token_ids)
    assert torch.allclose(vector(raw), state, atol=1e-4)
    [encoded] = llm.encode(TEXTS[0], PoolingParams(task="embed"), pooling_task="embed")
    assert encoded.outputs == PoolingOutput(torch.tensor(llm.embed(TEXTS[0])[0].outputs.embedding))
    for other in (torch.empty(0), encoded.outputs.data[:8], encoded.outputs.data + 1):
        assert encoded.outputs != PoolingOutput(other), "neither a failed request's, nor one of another length"
    assert PoolingOutput(torch.empty(0)) != PoolingOutput(torch.tensor([0.7])) and encoded.outputs != 1
    assert len({PoolingOutput(torch.tensor(numbers)) for numbers in ([0.0, 1.0], [-0.0, 1.0], [1.0, 0.0])}) == 2
    assert all(output.outputs.score <= 1 for output in llm.score(TEXTS, TEXTS))
    expect("encode() needs a pooling_task", llm.encode, "x")
    expect("asks for a vector of each token", llm.encode, "x", pooling_task="token_embed")
    expect("task 'classify' is asked of an LLM that was built without a score head", llm.classify, "x")
    expect('hf_overrides={"is_matryoshka": true}', llm.embed, "x", pooling_params=PoolingParams(dimensions=8))
    expect("there must be a prompt", llm.embed, [])
    expect("prompts[1]: a prompt must have 1 to 256 tokens (max_model_len), found 0", llm.embed, ["x", []])
    expect("a token id of the prompt must be", llm.embed, [[5, 320]])
    expect("PoolingParams takes 'normalize' only as None (found True)", PoolingParams, normalize=True)
    expect("did you mean 'dimensions'", PoolingParams, dimension=3)
    for ask in (llm.encode, llm.embed, llm.classify, partial(llm.score, "x")):
        name = getattr(ask, "func", ask).__name__
        expect(f"{name} has no argument 'use_tdqm' (found False); did you mean 'use_tqdm'?", ask, "x", use_tdqm=False)
    expect("2 prompts need 2 pooling_params", llm.embed, ["x", "y"], pooling_params=[PoolingParams()])
    trained = {"is_matryoshka": True, "matryoshka_dimensions": None}
    cut = make(checkpoint("qwen3"), hf_overrides=trained, pooler_config={"use_activation": False})
    for params, expected in (
        (PoolingParams(dimensions=8), state[:8]),
        (PoolingParams(dimensions=8, use_activation=True), normed(state[:8])),
        (None, state),
    ):
        assert torch.allclose(vector(cut.embed(TEXTS[0], pooling_params=params)[0]), expected, atol=1e-4)
    expect(
        "dimensions must be a whole number between 1 and 64",
        cut.embed,
        "x",
        pooling_params=PoolingParams(dimensions=65),
    )
    eight = make(checkpoint("qwen3"), hf_overrides={"is_matryoshka": True}, pooler_config=PoolerConfig(dimensions=8))
    assert len(eight.embed("x")[0].outputs.embedding) == 8
    expect('hf_overrides={"is_matryoshka": true}', make, checkpoint("qwen3"), pooler_config={"dimensions": 8})
    assert vector(llm.embed(TEXTS[0], pooling_params=PoolingParams(dimensions=64))[0]).tolist() == pytest.approx(
        vector(llm.embed(TEXTS[0])[0]).tolist()
    ), "all of them: nothing is cut"
    whole = make(checkpoint("qwen3"), pooler_config=PoolerConfig(dimensions=64))
    assert len(whole.embed("x")[0].outputs.embedding) == 64
    some = make(checkpoint("qwen3"), hf_overrides={"matryoshka_dimensions": [8, 16]})
    assert len(some.embed("x", pooling_params=PoolingParams(dimensions=64))[0].outputs.embedding) == 64
    expect("dimensions must be one of [8, 16]", some.embed, "x", pooling_params=PoolingParams(dimensions=9))


def test_truncation(llm):
    ids = llm.get_tokenizer()("gulls " * 200).input_ids
    limit = 256
    expect(f"1 to {limit} tokens (max_model_len), found {limit + 1}", llm.embed, [(ids * 9)[: limit + 1]])
    assert len(llm.embed([(ids * 9)[:limit]])[0].prompt_token_ids) == limit, "nothing is generated: all may be prompt"
    for options, kept in (
        ({"truncate_prompt_tokens": 7}, ids[:7]),
        ({"tokenization_kwargs": {"truncate_prompt_tokens": 7, "truncation_side": "left"}}, ids[-7:]),
        ({"truncate_prompt_tokens": -1}, ids[:limit]),
    ):
        assert llm.embed("gulls " * 200, **options)[0].prompt_token_ids == kept
        assert llm.embed([ids], **options)[0].prompt_token_ids == kept
    expect("truncate_prompt_tokens=257 is more than max_model_len=256", llm.embed, "x", truncate_prompt_tokens=257)
    expect("truncate_prompt_tokens=0 leaves no token", llm.embed, "x", truncate_prompt_tokens=0)
    expect("truncation_side must be one of", llm.embed, "x", tokenization_kwargs={"truncation_side": "up"})


def test_as_many_tokens_as_sentence_transformers_takes(embedder, tmp_path, caplog):
    caplog.set_level("INFO", "nanovllm")
    folder = shutil.copytree(embedder, tmp_path / "embedder")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 20}')
    llm = LLM(str(folder), **SMALL | {"max_model_len": None})
    [cut] = llm.embed("gulls " * 20, truncate_prompt_tokens=-1)
    assert cut.prompt_token_ids == llm.get_tokenizer()("gulls " * 20).input_ids[:20]
    assert "max_model_len 512 -> 20: max_seq_length of" in caplog.text
    assert len(LLM(str(folder), **SMALL).embed("gulls " * 20)[0].prompt_token_ids) > 20, "the caller has the last word"


def test_truncation_keeps_special_tokens(checkpoint, tmp_path):
    """Qwen3-Embedding reads the state of a token that its tokenizer puts behind every text."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <|eos|>", special_tokens=[("<|eos|>", 1)]
    )
    tokenizer.save_pretrained(tmp_path)
    llm = make(checkpoint("qwen3"), tokenizer=str(tmp_path))
    text = "the quick brown fox jumps over the lazy dog"
    plain = llm.embed(text)[0].prompt_token_ids
    assert plain[-1] == 1
    assert llm.embed(text, truncate_prompt_tokens=4)[0].prompt_token_ids == [*plain[:3], 1]
    left = {"truncate_prompt_tokens": 4, "truncation_side": "left"}
    assert llm.embed(text, tokenization_kwargs=left)[0].prompt_token_ids == plain[-4:]
    assert llm.embed(text, tokenization_kwargs={"add_special_tokens": False})[0].prompt_token_ids == plain[:-1]


def test_adapters(checkpoint, tmp_path):
    from tests.features.lora.adapters import make_adapter  # as peft computes them

    adapter = LoRARequest("one", 1, str(make_adapter(tmp_path / "one", checkpoint("qwen3"))))
    llm = make(checkpoint("qwen3"), enable_lora=True)
    plain, adapted = (llm.embed(TEXTS[0], lora_request=who)[0] for who in (None, adapter))
    assert plain.outputs != adapted.outputs and adapted.num_cached_tokens == 0


def test_an_adapter_trained_on_an_embedder(checkpoint, tmp_path):
    """Where nothing follows the layers, names have no prefix: neither in the checkpoint nor in the adapter."""
    from peft import PeftModel

    from tests.features.lora.adapters import make_adapter

    base = AutoModel.from_pretrained(checkpoint("qwen3"), dtype=torch.float32)
    base.save_pretrained(tmp_path / "embedder")
    make_tokenizer().save_pretrained(tmp_path / "embedder")
    options = {"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "FEATURE_EXTRACTION"}
    adapter = make_adapter(tmp_path / "adapter", tmp_path / "embedder", made_for=AutoModel, **options)
    llm = make(tmp_path / "embedder", enable_lora=True)
    [output] = llm.embed([[5, 6, 7, 8]], lora_request=LoRARequest("one", 1, str(adapter)))
    with torch.inference_mode():
        state = PeftModel.from_pretrained(base, adapter)(torch.tensor([[5, 6, 7, 8]])).last_hidden_state[0, -1]
    assert torch.allclose(vector(output), state / state.norm(), atol=1e-5)


@pytest.mark.nightly
def test_two_ranks(checkpoint, llm, processes):
    two = processes.llm(checkpoint("qwen3"), 2, runner="pooling", **SMALL)
    for output, other in zip(two.embed(TEXTS), llm.embed(TEXTS), strict=True):
        assert torch.allclose(vector(output), vector(other), atol=1e-5)


def test_a_failed_state_is_an_error(checkpoint, tmp_path, caplog):
    """Not NaN in a list of numbers. Others in the batch go on."""
    llm = make(checkpoint("qwen3"))
    with torch.no_grad():
        llm.engine.model_runner.model.embed_tokens[7] = float("inf")
    good, bad = llm.embed([[5, 6], [5, 7]])
    assert good.error is None and "NaN or infinity" in bad.error and bad.outputs.embedding == []
    assert "ends with an error" in caplog.text


# -- classifiers and scores -------------------------------------------------------------------------------------------


@torch.inference_mode()
def reference_labels(model, token_ids):
    return model(torch.tensor([token_ids])).logits[0]


@pytest.mark.parametrize("num_labels", [1, 3])
def test_classifier(classifier, num_labels):
    folder, model = classifier(num_labels)
    llm = LLM(str(folder), **SMALL)
    logits = llm.classify(TEXTS, pooling_params=PoolingParams(use_activation=False))
    for output, raw in zip(llm.classify(TEXTS), logits, strict=True):
        expected = reference_labels(model, output.prompt_token_ids)
        assert torch.allclose(torch.tensor(raw.outputs.probs), expected, atol=1e-4)
        probabilities = expected.softmax(-1) if num_labels > 1 else expected.sigmoid()
        assert torch.allclose(torch.tensor(output.outputs.probs), probabilities, atol=1e-5)
    expect("convert='embed' builds the other kind", llm.embed, "x")
    expect("are an embedding's", llm.classify, "x", pooling_params=PoolingParams(dimensions=3))
    if num_labels > 1:
        expect("this classifier has 3 labels", llm.score, "x", "y")
        return
    [pair] = llm.score("two gulls", " a red boat")
    tokens = [token for text in ("two gulls", " a red boat") for token in llm.get_tokenizer()(text).input_ids]
    assert pair.prompt_token_ids == tokens
    logit = reference_labels(model, tokens)
    assert pair.outputs.score == pytest.approx(logit.sigmoid().item(), abs=1e-5)
    # As sentence-transformers 5.4 writes it.
    (folder / "config_sentence_transformers.json").write_text('{"activation_fn": "torch.nn.modules.linear.Identity"}')
    [raw] = LLM(str(folder), **SMALL).score("two gulls", " a red boat")
    assert raw.outputs.score == pytest.approx(logit.item(), abs=1e-4)


def test_a_pair_without_special_tokens(classifier, tmp_path):
    from tokenizers.processors import TemplateProcessing

    folder, _ = classifier(1)
    edit(folder / "config.json", use_sep_token=True)
    tokenizer, ends = make_tokenizer(), [("<|eos|>", 1)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <|eos|>", pair="$A <|eos|> $B:1 <|eos|>:1", special_tokens=ends
    )
    tokenizer.save_pretrained(tmp_path)
    llm = LLM(str(folder), tokenizer=str(tmp_path), **SMALL)
    plain = [token for text in TEXTS[:2] for token in make_tokenizer()(text).input_ids]
    [whole] = llm.score(*TEXTS[:2])
    [without] = llm.score(*TEXTS[:2], tokenization_kwargs={"add_special_tokens": False})
    assert without.prompt_token_ids == plain == [token for token in whole.prompt_token_ids if token != 1]
    assert whole.prompt_token_ids.count(1) == 2


def test_classifying_what_ends_in_padding(classifier):
    """transformers scores the last token that is not pad_token_id, the first one where all are."""
    folder, model = classifier(3)
    token_ids = make_tokenizer()(TEXTS[1]).input_ids
    pad = token_ids[-1]
    edit(folder / "config.json", pad_token_id=pad)
    model.config.pad_token_id = pad
    llm = LLM(str(folder), **SMALL)
    for prompt in (token_ids, [*token_ids, pad, pad, pad], token_ids[:5], [pad], [pad] * 9):
        [output] = llm.classify({"prompt_token_ids": prompt}, pooling_params=PoolingParams(use_activation=False))
        assert output.prompt_token_ids == prompt
        assert torch.allclose(torch.tensor(output.outputs.probs), reference_labels(model, prompt), atol=1e-4)


def test_reranker(yes_no):
    """The probability of yes against no after Qwen3-Reranker's own template; documents share its beginning."""
    null = {"use_sep_token": None}  # as if it were not there
    llm = make(yes_no, hf_overrides=RERANKER | null, max_model_len=512, num_gpu_blocks_override=600)
    documents = ["two gulls circled", "the lazy dog", "a red boat"]
    outputs = llm.score("where are the gulls?", documents, use_tqdm=False)
    for output, document in zip(outputs, documents, strict=True):
        text = QWEN3_RERANKER.format(instruction=INSTRUCTION, query="where are the gulls?", document=document)
        assert llm.get_tokenizer().decode(output.prompt_token_ids) == text
        with torch.inference_mode():
            logits = reference_model(yes_no)(torch.tensor([output.prompt_token_ids])).logits[0, -1]
        assert output.outputs.score == pytest.approx(logits[[318, 319]].softmax(-1)[1].item(), abs=1e-5)
    begins = QWEN3_RERANKER.format(instruction=INSTRUCTION, query="where are the gulls?", document="|").split("|<")[0]
    shared = (len(llm.get_tokenizer()(begins).input_ids) - 1) // 4 * 4
    assert sorted(output.num_cached_tokens >= shared for output in outputs) == [False, True, True]
    template = "{{ messages[0]['content'] }}|{{ messages[1]['content'] }}"
    assert llm.get_tokenizer().decode(llm.score("a", "b", chat_template=template)[0].prompt_token_ids) == "a|b"
    written = [QWEN3_RERANKER.split("{document}")[0], "b" + QWEN3_RERANKER.split("{document}")[1]]
    [own] = llm.score(*written)
    assert llm.get_tokenizer().decode(own.prompt_token_ids) == "".join(written), (
        "whoever writes it himself gets it once"
    )
    ranks = make(yes_no, hf_overrides=RERANKER, max_model_len=512, num_gpu_blocks_override=600, quantization="int8")
    assert 0 < ranks.score("a", "b")[0].outputs.score < 1


def test_a_reranker_of_sentence_transformers(yes_no, tmp_path):
    """What reads its scores off the logits is no pooling: it generates, or scores as the caller says."""
    folder = shutil.copytree(yes_no, tmp_path / "model")
    names = ["base.modules.transformer.Transformer", "cross_encoder.modules.logit_score.LogitScore"]
    modules = [{"path": "", "type": f"sentence_transformers.{name}"} for name in names]
    (folder / "modules.json").write_text(json.dumps(modules))
    assert LLM(str(folder), **SMALL).generate("two", SamplingParams(max_tokens=1))[0].outputs[0].token_ids
    template = "{{ messages[0]['content'] }}|{{ messages[1]['content'] }}"
    [pair] = make(folder, hf_overrides=RERANKER).score("a", "b", chat_template=template)
    [same] = make(yes_no, hf_overrides=RERANKER).score("a", "b", chat_template=template)
    assert pair.outputs == same.outputs
    expect("has a module 'LogitScore'", make, folder)
    expect("a Qwen3-Reranker needs hf_overrides=", make, folder)


@pytest.mark.compiler
def test_a_long_document_is_cut_before_the_template(yes_no):
    """The score is read behind the template's end, whatever the cut."""
    llm = make(yes_no, hf_overrides=RERANKER, max_model_len=512, num_gpu_blocks_override=600)
    tokenizer, document = llm.get_tokenizer(), "two gulls 😀 and a red boat, " * 60
    before, behind = QWEN3_RERANKER.format(instruction=INSTRUCTION, query="gulls?", document="|").split("|<|im_end|>")
    behind = "<|im_end|>" + behind
    least = len(tokenizer(before + behind).input_ids)
    for num in (-1, 500, 470, least + 1):
        for side in ("right", "left"):
            options = {"truncate_prompt_tokens": num, "tokenization_kwargs": {"truncation_side": side}}
            [output] = llm.score("gulls?", document, **options)
            text, limit = tokenizer.decode(output.prompt_token_ids), 512 if num == -1 else num
            assert limit - 4 <= len(output.prompt_token_ids) <= limit
            assert text.startswith(before) and text.endswith(behind)
            kept = text[len(before) : -len(behind)]
            assert document.startswith(kept) if side == "right" else document.endswith(kept)
            [same] = llm.score("gulls?", kept)
            assert same.outputs.score == output.outputs.score
    expect(f"{least} tokens leave none for the document", llm.score, "gulls?", document, truncate_prompt_tokens=least)
    expect("truncate_prompt_tokens=-1 cuts it", llm.score, "gulls?", document)
    written = before + "two gulls ", "and a red boat " * 60 + behind
    [own] = llm.score(*written, truncate_prompt_tokens=400)
    assert tokenizer.decode(own.prompt_token_ids).endswith(behind), "so does a template that the caller has written"
    template = "Q {{ messages[0]['content'] }} D {{ messages[1]['content'] }} END"
    [output] = llm.score("a", document, truncate_prompt_tokens=60, chat_template=template)
    assert tokenizer.decode(output.prompt_token_ids).startswith("Q a D two")
    assert tokenizer.decode(output.prompt_token_ids).endswith(" END")


def test_a_long_document_is_cut_before_the_separator(classifier, tmp_path):
    from tokenizers.processors import TemplateProcessing

    folder, _ = classifier(1)
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <|eos|>", pair="$A <|eos|> $B <|eos|>", special_tokens=[("<|eos|>", 1)]
    )
    tokenizer.save_pretrained(tmp_path)
    llm = LLM(str(folder), tokenizer=str(tmp_path), **SMALL)
    query, document = ([text] * 9 for text in ("two gulls", "the lazy dog"))
    whole = llm.score("".join(query), "".join(document))[0].prompt_token_ids
    num_query = whole.index(1)
    [cut] = llm.score("".join(query), "".join(document), truncate_prompt_tokens=num_query + 9)
    assert cut.prompt_token_ids == [*whole[: num_query + 8], 1]
    left = {"truncate_prompt_tokens": num_query + 9, "truncation_side": "left"}
    [cut] = llm.score("".join(query), "".join(document), tokenization_kwargs=left)
    assert cut.prompt_token_ids == [*whole[: num_query + 1], *whole[-8:]]


@pytest.mark.parametrize("side", ["right", "left"])
def test_cutting_a_text(side, monkeypatch):
    """A piece of it, of no more tokens; by places or, where the tokenizer knows none, by counting."""
    tokenizer, text = make_tokenizer(), "two gulls é😀 你好 <|eos|> the quick  fox\n" * 3
    without = copy(tokenizer)
    monkeypatch.setattr(without, "__class__", type("Slow", (type(tokenizer),), {"__call__": without_places}))
    for num in range(0, len(tokenizer(text).input_ids) + 2):
        for asked in (tokenizer, without):
            kept = Cut(asked, text, side).keep(num)
            assert text.startswith(kept) if side == "right" else text.endswith(kept)
            assert num - 4 <= len(tokenizer(kept).input_ids) <= num or kept == text


def without_places(self, *args, return_offsets_mapping=False, **options):
    if return_offsets_mapping:
        raise NotImplementedError
    return super(type(self), self).__call__(*args, **options)


def test_scores_of_embeddings(llm):
    one, two, three = (vector(output) for output in llm.embed(TEXTS))
    scores = [output.outputs.score for output in llm.score(TEXTS[0], TEXTS)]
    assert scores == pytest.approx([1.0, one.dot(two).item(), one.dot(three).item()], abs=1e-6)
    [pair] = llm.score(TEXTS[1], TEXTS[2])
    assert pair.outputs.score == pytest.approx(two.dot(three).item(), abs=1e-6)
    assert [o.outputs.score for o in llm.score(TEXTS, TEXTS[::-1])] == pytest.approx(
        [scores[2], 1, scores[2]], abs=1e-6
    )
    expect("found 2 and 3", llm.score, TEXTS[:2], TEXTS)
    expect("data_2 must be a text or a list of texts, not empty; found []", llm.score, "x", [])
    expect("this LLM embeds each alone", llm.score, "x", "y", chat_template="{{ messages }}")


# -- what is refused --------------------------------------------------------------------------------------------------


def test_a_generating_llm_says_why(checkpoint):
    llm = LLM(str(checkpoint("qwen3")), **SMALL)
    for name, arguments in (("embed", "x"), ("classify", "x"), ("encode", "x"), ("score", "xy")):
        expect("needs an LLM that was built with runner='pooling'", getattr(llm, name), *arguments)
    assert llm.generate("two", SamplingParams(max_tokens=1))[0].outputs[0].token_ids
    expect("pooler_config is of embeddings", LLM, str(checkpoint("qwen3")), pooler_config={"use_activation": False})


@pytest.mark.parametrize("name", ["BertModel", "XLMRobertaForSequenceClassification", "ModernBertModel", "GteNewModel"])
def test_encoders(copy_of, name):
    folder = copy_of("qwen3")
    edit(folder / "config.json", architectures=[name])
    expect(f"{name} is an encoder: its tokens see later ones", make, folder)


def test_checkpoints_that_pool_otherwise(copy_of, embedder, tmp_path):
    folder = shutil.copytree(embedder, tmp_path / "embedder")
    for mode in ("pooling_mode_mean_tokens", "pooling_mode_cls_token"):
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({mode: True}))
        expect("only LAST is computed here", LLM, str(folder))
    assert LLM(str(folder), pooler_config=PoolerConfig(pooling_type="LAST"), **SMALL).embed("x")
    (folder / "1_Pooling" / "config.json").write_text("{")
    expect("cannot be read", LLM, str(folder))
    (folder / "modules.json").write_text('[{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]')
    expect("has a module 'Dense'", LLM, str(folder))
    folder = copy_of("qwen3")
    edit(folder / "config.json", is_causal=False)
    expect("is_causal is false", make, folder)


@pytest.mark.parametrize(("number", "kind"), [(1, "'MEAN'"), (2, "'CLS'"), (4, "'RANK'"), (7, "7")])
def test_gguf_files_that_pool_otherwise(checkpoint, tmp_path, number, kind):
    """They generate as ever, and embed where the caller chooses the last token."""
    path = write_gguf(checkpoint("qwen3"), tmp_path / "model.gguf", **{"qwen3.pooling_type": number})
    expect(f"the pooling_type is {kind}, and only LAST", make, path)
    assert make(path, pooler_config={"pooling_type": "LAST"}).embed("x", use_tqdm=False)
    assert LLM(str(path), **SMALL).generate("x", SamplingParams(max_tokens=1), use_tqdm=False)


@pytest.mark.parametrize("number", [0, 3])
def test_gguf_files_that_pool_the_last_token(checkpoint, tmp_path, number):
    path = write_gguf(checkpoint("qwen3"), tmp_path / "model.gguf", **{"qwen3.pooling_type": number})
    assert make(path).embed("x", use_tqdm=False)


def test_options_that_do_not_fit(checkpoint, yes_no):
    folder = checkpoint("qwen3")
    expect("has no score head to classify by", make, folder, convert="classify")
    expect("has no score.weight", make, folder, hf_overrides={"architectures": ["Qwen3ForSequenceClassification"]})
    expect("convert='embed' needs runner='pooling'", make, folder, runner="generate", convert="embed")
    expect("speculative_config proposes tokens that are sampled", make, folder, speculative_config={"method": "ngram"})
    expect("only LAST is computed here", EngineConfig, model="x", pooler_config={"pooling_type": "MEAN"})
    expect("pooler_config must be a dict or a PoolerConfig", EngineConfig, model="x", pooler_config=3)
    expect("runner must be one of auto, generate, pooling", EngineConfig, model="x", runner="draft")
    expect("'maybe' is no token", make, yes_no, hf_overrides=RERANKER | {"classifier_from_token": ["no", "maybe"]})
    three = RERANKER | {"classifier_from_token": ["no", "yes", "x"]}
    expect("needs two tokens", make, yes_no, hf_overrides=three)
