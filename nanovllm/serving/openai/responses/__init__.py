"""OpenAI's responses API, translated into chats and back (chapter 14)."""
