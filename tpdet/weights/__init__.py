"""Weights: read slice by slice from safetensors, checked, digested; or drawn for benchmarks."""
