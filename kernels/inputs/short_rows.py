"""How many rows of a sequence in a step are few: attention shares them out otherwise. No torch."""

SHORT_TOKENS = 16
"""The most rows of a sequence whose splits run in parallel on a GPU."""
