"""Below the pool: K/V that has left it, in memory and on a disk, asked for by name (chapter 7). No torch, no files."""
