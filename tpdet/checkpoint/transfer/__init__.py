"""Weights that a trainer sends while the server runs: what arrives, and what carries it."""
