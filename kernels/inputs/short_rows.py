"""How many rows of a sequence in a step are few: attention shares them out otherwise. No torch."""

SHORT_TOKENS = 16
"""Up to so many rows a sequence's splits run in parallel on a GPU."""
