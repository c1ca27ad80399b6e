"""Programs of others (a grammar, a chat template) are run in another process, which the system ends at a bound."""
