"""What lies on a disk: hub, tokenizer, config.json, safetensors, GGUF."""
