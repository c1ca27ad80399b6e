"""Images in prompts: placeholders, positions, the tower, and what the prefix cache knows of them (chapter 7)."""
