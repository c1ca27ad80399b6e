"""What scripts written for vLLM and nano-vllm import and say: taken where the same thing, or nothing, is asked for."""
