"""A test lies where in nanovllm/ lies what it tests; the heart's, and what tests share, lie here."""
