"""What a function in C may be handed: tensors of the dtype, the shape and the layout that it reads."""

import re
from pathlib import Path

import pytest
import torch

import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.core.sequence import Sequence
from nanovllm.features.hybrid.hybrid_kernels import kernels_for
from nanovllm.worker.c_calls import address, address_or_null
from nanovllm.worker.sampler import SamplingBatch
from tests.checkpoints import SMALL
from tests.features.hybrid.test_hybrid import batch_of
from tests.worker.cpu.test_kernels import kernels

FLOATS = torch.zeros(6, 4, 8)


def test_a_tensor_as_it_is_read():
    assert address(FLOATS, torch.float32, (6, 4, 8)) == FLOATS.data_ptr()
    assert address(FLOATS[2:], torch.float32, (4, 4, 8)) == FLOATS.data_ptr() + 2 * 4 * 8 * 4
    assert address(FLOATS[:, :2], torch.float32, (6, 2, 8), 1) == FLOATS.data_ptr()
    assert address(FLOATS[..., :5], torch.float32, (6, 4, 5), 2) == FLOATS.data_ptr()
    assert address(FLOATS[:1, :1].expand(3, 1, 8), torch.float32, (3, 1, 8), 1) == FLOATS.data_ptr()
    assert address(FLOATS[0], torch.float32, (4, 8), room=6 * 4 * 8) == FLOATS.data_ptr()
    assert address_or_null(None, torch.float32, (4,)) is None


@pytest.mark.parametrize(
    ("tensor", "options"),
    [
        (FLOATS.bfloat16(), {}),
        (FLOATS.double(), {}),
        (FLOATS[:5], {}),
        (FLOATS.view(6, 32), {}),
        (FLOATS.new_zeros(6, 5, 8)[:, :4], {}),
        (FLOATS.new_zeros(6, 4, 9)[..., :8], {"apart": 1}),
        (FLOATS.new_zeros(8, 4, 6).transpose(0, 2), {"apart": 2}),
        (FLOATS, {"room": 6 * 4 * 8 + 1}),
        (FLOATS.to("meta"), {}),
    ],
)
def test_any_other_tensor_is_refused(tensor, options):
    with pytest.raises(TypeError, match=r"C reads torch.float32 \[6, 4, 8\].* and this is torch\."):
        address(tensor, torch.float32, (6, 4, 8), **options)


def test_every_pointer_goes_through_it():
    """Only who compares where tensors lie asks PyTorch itself."""
    for path in Path(nanovllm.__file__).parent.rglob("*.py"):
        found = re.findall(r"(\w+\(\))?\.data_ptr\b", path.read_text("utf-8"))
        assert set(found) <= {"untyped_storage()"} or path.name == "c_calls.py", path


def test_kernels_refuse_what_they_would_read_wrongly():
    found, x = kernels(torch.bfloat16), torch.zeros(3, 128)
    greedy = SamplingBatch.from_sequences([Sequence([0], SamplingParams(temperature=0))] * 3)
    with pytest.raises(TypeError, match=r"reads torch\.bfloat16 .*, and this is torch\.float32"):
        found.silu_and_mul(x)
    with pytest.raises(TypeError, match=r"reads torch.float32 \[3, 128\]"):
        found.choose_tokens(x.bfloat16(), greedy)
    with pytest.raises(TypeError, match=r"reads torch.bfloat16 \[3, 64\]"):
        found.linear(x.bfloat16(), found.reorder_weight(torch.zeros(8, 64).bfloat16()), None)


def test_a_float32_parameter_that_lost_its_dtype_is_no_reading_beyond_its_end(checkpoint):
    llm = LLM(str(checkpoint("qwen3.5")), dtype="bfloat16", enforce_eager=True, **SMALL)
    net, found = llm.engine.model_runner.model.layers[0].self_attn.to(torch.bfloat16), kernels(torch.bfloat16)
    batch = batch_of(query_lens=[2])
    x = torch.zeros(2, sum(net.in_proj.out_sizes)).bfloat16()
    with pytest.raises(TypeError, match=r"reads torch\.float32"):
        kernels_for(found).delta_net(x, net, (), batch)
