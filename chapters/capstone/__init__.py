"""The capstone: serve a trace within a memory, with policies of your own; repair five broken engines (README.md)."""
