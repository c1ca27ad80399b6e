"""Trying grammars in another process, before one is compiled in this one."""
