"""Arithmetic that gives the same bits on every device: random numbers and rotary tables."""
