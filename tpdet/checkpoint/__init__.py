"""Weights: read slice by slice from safetensors, checked, digested; or random for benchmarks."""
