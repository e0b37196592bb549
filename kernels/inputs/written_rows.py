"""Rows that are sampled again and again, each time one position further: numbers on the device."""

WORDS = 13
"""int64 values of a row. What they mean is its device's own."""
