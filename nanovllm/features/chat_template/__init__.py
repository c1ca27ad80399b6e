"""A conversation as a prompt (chapter 2)."""
