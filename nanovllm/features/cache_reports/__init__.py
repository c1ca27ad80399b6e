"""What the prefix cache tells: events for those who follow it, lifetimes of its blocks (chapters 7 and 14)."""
