"""Checks of what users write: command lines, sampling parameters, vLLM's names for them."""
