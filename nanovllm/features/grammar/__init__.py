"""Text that fits a JSON schema, a regular expression, a choice or a grammar; masks of logits (chapter 8)."""
