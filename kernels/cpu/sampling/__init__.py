"""Sampling on the CPU: penalties, filters, Gumbel noise and log-probabilities, row by row."""
