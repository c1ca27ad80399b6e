"""Who calls an LLM: threads that take turns, and a person at a terminal (chapter 2)."""
