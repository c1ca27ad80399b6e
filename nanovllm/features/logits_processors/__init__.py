"""What may change logits before a token is chosen: penalties, biases, bans, masks of grammars (chapter 8)."""
