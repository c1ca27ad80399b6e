"""The course: seventeen chapters about the engine in nanovllm/, each with a text, a lab, a quiz and graded exercises.

Run from the repository's root: python -m chapters
"""
