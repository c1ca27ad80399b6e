"""Where vLLM's scripts look for helpers."""
