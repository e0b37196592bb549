"""GEMM kernels, a variant each: all of one bit class, so that the choice shows in time only."""
