"""OpenAI's format: bodies in, answers out, for the server and for batch jobs (chapter 14)."""
