"""The script everybody starts from; it prints three prompts and their continuations.

python examples/offline_inference.py [MODEL]
"""

from measuring import arguments

from nanovllm import LLM, SamplingParams
from nanovllm.tools.demo_model import model_or_demo

args = arguments(__doc__).parse_args()
prompts = ["The capital of France is", "Water boils at", "The three primary colours are"]
llm = LLM(model_or_demo(args.model))
for output in llm.generate(prompts, SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=24)):
    print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
