"""What the prefix cache tells: events for who follows it, lifetimes of its blocks, hits by tier (chapter 7)."""
