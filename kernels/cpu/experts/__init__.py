"""Mixture of experts on the CPU: the choice, grouped products, lanes."""
