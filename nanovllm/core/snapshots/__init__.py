"""States of fixed size: which sequence has which slot, and where a later request can begin (chapter 16)."""
