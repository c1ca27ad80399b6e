"""The engine for many users: in a thread, as an async iterator, over HTTP (chapter 14)."""
