"""Mixtures of experts: each token meets a few of many MLPs (chapter 17)."""
