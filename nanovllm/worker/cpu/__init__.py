"""What belongs to CPUs: kernels in C, memory."""
