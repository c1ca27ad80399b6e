"""Hybrid models: layers whose memory does not grow beside layers with attention (chapter 16)."""
