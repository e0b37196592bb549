"""Attention on a GPU, rotation and stored keys too: bits, and times beside SDPA."""
