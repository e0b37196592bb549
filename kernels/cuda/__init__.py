"""The GPU path: the contract's operations as Triton kernels, one bit class an architecture."""
