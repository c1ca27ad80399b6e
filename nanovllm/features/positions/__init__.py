"""Rotary embeddings that are scaled, and layers that see a window or rotate nothing (chapter 1)."""
