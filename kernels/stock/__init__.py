"""Kernels of the approximate mode alone: no bit of theirs is promised."""
