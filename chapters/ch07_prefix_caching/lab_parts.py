"""Parts of lab 7: a simulator on the engine's own BlockManager, a real model, and six traps put into the engine."""

from nanovllm import LLM, SamplingParams


def ask(llm: LLM, prompt: str, salt: str | None = None) -> tuple[float, int, int, str]:
    """Milliseconds to the first token, prompt tokens, how many of them were found, and the answer."""
    params = SamplingParams(temperature=0, max_tokens=8)
    [output] = llm.generate([{"prompt": prompt, "cache_salt": salt} if salt else prompt], params, use_tqdm=False)
    ttft_s = output.metrics.ttft_s or 0.0
    return ttft_s * 1e3, len(output.prompt_token_ids), output.num_cached_tokens, output.outputs[0].text
