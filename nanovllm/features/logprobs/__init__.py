"""Log probabilities of generated and of prompt tokens (chapter 8)."""
