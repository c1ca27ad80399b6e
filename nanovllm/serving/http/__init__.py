"""`nanovllm serve`: OpenAI's API over HTTP, and a page that shows the engine at work (chapter 14). Extra `serve`."""
