"""What a person may pass: values, options, requests, vLLM's names. Checked once, at the boundary."""
