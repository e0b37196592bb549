"""Sampling on a GPU and over several: bits against the CPU's path, and times."""
