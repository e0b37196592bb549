"""The operations of the contract as operators of torch: `torch.ops.tpdet`.

Every operator has implementations for the CPU and for GPUs, which are the kernels (`kernels/ops`),
shapes for tracing, and, where it is differentiable, gradients. Expressions of the fold travel as
the strings of `write_roots`, groups of experts as numbers, sequences as lists of their lengths.
"""
