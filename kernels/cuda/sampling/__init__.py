"""Sampling: penalties, filters, Gumbel noise and log-probabilities of many rows at once."""
