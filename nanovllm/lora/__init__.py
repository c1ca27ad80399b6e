"""Adapters that a request chooses (chapter 15): what a caller says of one, and its files."""
