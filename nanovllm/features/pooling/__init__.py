"""Embeddings and scores: what the last token's hidden state says of a whole text (chapter 7: prefixes they share)."""
