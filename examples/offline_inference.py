"""The script everybody starts from; it prints three prompts and their continuations.

python examples/offline_inference.py [MODEL]
"""

import sys

from nanovllm import LLM, SamplingParams
from nanovllm.tools.demo_model import model_or_demo

prompts = ["The capital of France is", "Water boils at", "The three primary colours are"]
llm = LLM(model_or_demo(*sys.argv[1:2]))
for output in llm.generate(prompts, SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=24)):
    print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
