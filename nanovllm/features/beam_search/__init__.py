"""Beam search: the most probable continuations, found by keeping several at a time (chapter 8 has the other way)."""
