"""Calls of functions in a model's answer: how each family writes them, read while the text comes (chapter 14)."""
