"""Mixture of experts on the CPU: router, grouped products, lanes."""
