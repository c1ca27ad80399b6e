"""What the prefix cache tells: events for who follows it, lifetimes of its blocks (chapters 7 and 14)."""
