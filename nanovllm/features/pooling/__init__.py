"""Embeddings and scores: what the last token's hidden state says of a whole text (chapters 2 and 4)."""
