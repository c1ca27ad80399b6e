"""Draft tokens that a step checks beside the tokens that it has to compute (chapter 13)."""
