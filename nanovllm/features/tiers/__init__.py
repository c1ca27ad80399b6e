"""The stores below the pool: memory, and a directory that outlives the process (chapter 7). core/tiers asks them."""
