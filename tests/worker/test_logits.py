"""Logits are float32, whatever the weights are: rounded to bf16 or fp16, the largest of a row often tie."""

from shutil import copytree
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanovllm import LLM, LoRARequest, SamplingParams
from tests.checkpoints import SMALL, make_checkpoint
from tests.features.lora.adapters import make_adapter
from tests.pretend_gpu import pretend_gpu

PROMPT, FIRST, BEST = [5, 6, 7], 10, 11
GREEDY = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
DTYPES = ["bfloat16", "float16"]
BACKENDS: dict[str, dict[str, Any]] = {
    "C, recorded": {},
    "C": {"optimizations": ("c_kernels", "reordered_weights")},
    "C, other products": {"optimizations": ("c_kernels",)},
    "oneDNN": {"optimizations": ("reordered_weights",)},
    "PyTorch": {"enforce_eager": True},
}


def hidden_of(llm: LLM) -> Tensor:
    """The hidden state of the prompt's last token, as the output head gets it in a step that is not recorded."""
    found: list[Tensor] = []
    head = llm.engine.model_runner.model.lm_head
    hook = head.register_forward_hook(lambda module, inputs, y: found.append(inputs[0]))
    llm.generate([PROMPT], GREEDY, use_tqdm=False)
    hook.remove()
    return found[-1][-1].clone()


def logits_of(llm: LLM, **options: Any) -> tuple[Tensor, int]:
    """The logits of the prompt's last token, as the sampler gets them, and the greedy token."""
    found: list[Tensor] = []
    runner = llm.engine.model_runner
    sample = runner._sample

    def watched_sample(logits: Tensor, sampling: Any) -> Any:
        found.append(logits.cpu().clone())
        return sample(logits, sampling)

    with patch.object(runner, "_sample", watched_sample):
        (output,) = llm.generate([PROMPT], GREEDY, use_tqdm=False, **options)
    return found[-1][-1], output.outputs[0].token_ids[0]


@pytest.fixture(scope="module")
def with_a_tie(checkpoint, tmp_path_factory):
    """{dtype: a checkpoint whose second-best logit of PROMPT is the best one's equal once both are rounded}."""
    folders = {}
    for dtype in DTYPES:
        folder = copytree(checkpoint("llama"), tmp_path_factory.mktemp("tie") / dtype)
        hidden = hidden_of(LLM(str(folder), dtype=dtype, enforce_eager=True, **SMALL))
        tensors = load_file(folder / "model.safetensors")
        head = torch.zeros_like(tensors["lm_head.weight"])
        head[FIRST] = head[BEST] = hidden.sign().float() / 4
        smallest = hidden.abs().argmin()
        head[BEST, smallest] *= 1.0625
        rows = head[[FIRST, BEST]].double() @ hidden.double()
        assert rows[1] > rows[0] and rows.to(getattr(torch, dtype)).unique().numel() == 1
        save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
        folders[dtype] = folder
    return folders


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_best_token_is_found_where_rounded_logits_tie(with_a_tie, backend, dtype):
    llm = LLM(str(with_a_tie[dtype]), dtype=dtype, **BACKENDS[backend], **SMALL)
    logits, token = logits_of(llm)
    assert logits.dtype == torch.float32 and logits[BEST] > logits[FIRST]
    assert token == BEST


@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_pretend_gpu(with_a_tie, dtype):
    options = SMALL | dict(max_model_len=64, max_num_batched_tokens=24, max_num_seqs=4, optimizations=())
    with pretend_gpu():
        logits, token = logits_of(LLM(str(with_a_tie[dtype]), dtype=dtype, **options))
    assert logits.dtype == torch.float32 and token == BEST


@pytest.mark.parametrize("kind", ["int8", "adapter", "adapter, eager"])
def test_of_other_output_heads(tmp_path, kind):
    """Float32, and not numbers that bf16 has: of weights in groups, and with what an adapter adds."""
    folder = make_checkpoint(tmp_path / "model", "llama")
    if kind == "int8":
        llm, options = LLM(str(folder), dtype="bfloat16", quantization="int8", **SMALL), {}
    else:
        adapter = make_adapter(tmp_path / "adapter", folder, target_modules=["q_proj", "lm_head"])
        llm = LLM(str(folder), dtype="bfloat16", enable_lora=True, enforce_eager="eager" in kind, **SMALL)
        options = {"lora_request": LoRARequest("adapter", 1, str(adapter))}
    logits, token = logits_of(llm, **options)
    assert logits.dtype == torch.float32 and token == int(logits.argmax())
    assert (logits != logits.bfloat16().float()).float().mean() > 0.9


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["PyTorch", "C", "C, without pairs"])
def test_the_capital_of_france(demo_checkpoint, monkeypatch, how):
    """Its two best first tokens, in English and in French, would be one number in bf16.

    PyTorch's own products round as the processor does: there either may win, but it wins.
    """
    if how == "C, without pairs":
        monkeypatch.setattr("nanovllm.worker.cpu.c_kernels.pairs_pay", lambda: False)
    options = dict(enforce_eager=how == "PyTorch", max_model_len=128, num_gpu_blocks_override=16)
    llm = LLM(str(demo_checkpoint), **options)
    question = {"role": "user", "content": "What is the capital of France?"}
    (output,) = llm.chat([question], SamplingParams(temperature=0, logprobs=2), use_tqdm=False)
    best, second = (entry.logprob for entry in output.outputs[0].logprobs[0].values())
    assert best > second
    if how != "PyTorch":
        assert output.outputs[0].text == "The capital of France is Paris."
