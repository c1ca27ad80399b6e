"""What scripts written for vLLM and nano-vllm say beyond what this engine does: taken where it asks for nothing."""
