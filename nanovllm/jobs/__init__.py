"""Files of requests, answered: nanovllm run-batch (chapter 11)."""
