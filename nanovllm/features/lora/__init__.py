"""Adapters that a request chooses (chapter 15)."""
