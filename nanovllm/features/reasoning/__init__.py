"""What a model thinks before it answers, told from the answer (chapter 14)."""
