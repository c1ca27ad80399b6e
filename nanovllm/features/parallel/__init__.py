"""One model over several processes (chapter 9)."""
