"""What belongs to CUDA GPUs: Triton kernels, the call to flash-attn, recorded decode steps (chapter 10)."""
