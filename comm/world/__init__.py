"""Worlds: the ranks of one engine over gloo, NCCL or MPI, their nodes, their exit reasons."""
