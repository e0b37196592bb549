"""Proposers of the tokens that are expected to follow, one file each."""
