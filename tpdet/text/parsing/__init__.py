"""Reads answers: reasoning, content and calls of tools, by the family whose marks they have."""
