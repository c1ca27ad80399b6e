"""Loading: memory and dtypes."""

import sys

import pytest
import torch

from nanovllm import LLM

# Anonymous memory while the weights are read, sampled by a thread, against their size.
MEASURE = """
import sys, threading, time
from pathlib import Path
import torch
from nanovllm.checkpoint import ModelConfig
from nanovllm.worker.loader import load_model
def anonymous():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssAnon")) * 1024
folder = Path(sys.argv[1])
config = ModelConfig.from_directory(folder)
torch.zeros(1000, 1000) @ torch.zeros(1000, 1000)  # start the thread pools
before, peak, done = anonymous(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.001)
thread = threading.Thread(target=watch); thread.start()
model = load_model(folder, config, getattr(torch, sys.argv[2]), torch.device("cpu"))
done = True; thread.join()
weights = sum(p.nbytes for p in model.parameters())
print((max(peak, anonymous()) - before) / weights)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_anonymous_memory_stays_near_the_weights_size(demo_checkpoint, processes, dtype):
    status, out, err = processes.run("-c", MEASURE, str(demo_checkpoint), dtype)
    assert status == 0, err
    assert 0.9 < float(out) < 1.15


def test_dtype_auto_is_the_checkpoints(checkpoint, demo_checkpoint):
    assert LLM(str(checkpoint()), num_gpu_blocks_override=64).engine.model_runner.dtype is torch.float32
    assert LLM(str(demo_checkpoint), num_gpu_blocks_override=600).engine.model_runner.dtype is torch.bfloat16


def test_tied_embeddings_are_one_tensor(demo_checkpoint):
    model = LLM(str(demo_checkpoint), num_gpu_blocks_override=600, enforce_eager=True).engine.model_runner.model
    assert model.lm_head.weight is model.embed_tokens
