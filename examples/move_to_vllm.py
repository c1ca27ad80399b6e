"""One script, two engines: for the day you outgrow this one, only the import changes.

    python examples/move_to_vllm.py [MODEL]                     on nanovllm
    python examples/move_to_vllm.py [MODEL] --engine vllm       on vLLM, where it is installed

Prints three questions about one text, cold and warm, with the prompt tokens that were found in the cache; an answer
that must be one of three words; three samples of one prompt.

What moves, in both directions: LLM, EngineArgs, LLMEngine, AsyncLLM, SamplingParams, StructuredOutputsParams,
LoRARequest, generate() and chat(), prompts as text, token ids or dicts, flags (FlexibleArgumentParser), what comes
back, embed() and score() of pooling models, and the module paths that scripts import these from. What does not:
images as embeddings, videos and audio; our stream(), abort(), stats() and optimizations.
examples/move_to_vllm.md lists the options, and what to write instead of those that are missing.
"""

import time

from measuring import arguments, needs

parser = arguments(__doc__)
parser.add_argument("--engine", choices=["nanovllm", "vllm"], default="nanovllm")

CONTEXT = "The lighthouse was built in 1871. Its keeper, Ada, kept a grey cat and a red boat. " * 8
QUESTIONS = ["When was the lighthouse built?", "Who was its keeper?", "What colour was the boat?"]


def main() -> None:
    args = parser.parse_args()
    if args.engine == "vllm":
        with needs("vllm"):
            from vllm import LLM, SamplingParams
            from vllm.sampling_params import StructuredOutputsParams
    else:
        from nanovllm import LLM, SamplingParams
        from nanovllm.sampling_params import StructuredOutputsParams

    is_for_vllm = args.model and args.engine == "vllm"  # which may read what nanovllm does not
    model = args.model if is_for_vllm else here(args.model)
    llm = LLM(model, max_model_len=1024, max_num_seqs=16, gpu_memory_utilization=0.5, enable_prefix_caching=True)
    params = SamplingParams(temperature=0, max_tokens=24, stop=["\n"])
    for title in ("cold", "warm"):
        started = time.perf_counter()
        conversations = [[{"role": "user", "content": f"{CONTEXT}\n{question}"}] for question in QUESTIONS]
        outputs = llm.chat(conversations, params, use_tqdm=False)
        print(f"{title}: {time.perf_counter() - started:.2f} s")
        for question, output in zip(QUESTIONS, outputs, strict=True):
            num_prompt, num_cached = len(output.prompt_token_ids), output.num_cached_tokens
            print(f"  {question} {output.outputs[0].text.strip()} ({num_cached} of {num_prompt} tokens cached)")

    params.structured_outputs = StructuredOutputsParams(choice=["grey", "red", "green"])
    conversation = [
        {"role": "user", "content": [{"type": "text", "text": CONTEXT}, {"type": "text", "text": QUESTIONS[2]}]}
    ]
    [output] = llm.chat(conversation, params, use_tqdm=False)
    print(f"  one of three colours: {output.outputs[0].text}")

    several = SamplingParams(n=3, temperature=0.8, top_p=0.95, seed=1, max_tokens=12)
    [output] = llm.generate(["Once upon a time"], several, use_tqdm=False)
    for sample in output.outputs:
        print(f"  sample {sample.index}: {sample.text!r} ({sample.finish_reason})")


def here(model: str | None) -> str:
    from nanovllm.tools.demo_model import model_or_demo

    return model_or_demo(model)


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
