"""The control plane: which tokens are computed next and where their K/V lives. Standard library and xxhash only."""
