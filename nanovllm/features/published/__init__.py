"""Checkpoints that others quantized: FP8, GPTQ, AWQ, compressed-tensors, bitsandbytes (chapter 12)."""
