"""Below the pool: K/V that has left it, in memory and on a disk, by block hash (chapter 7). No torch, no files."""
