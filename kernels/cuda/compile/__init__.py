"""Compiling kernels ahead of their first launch: what is asked for, on threads and by helpers."""
