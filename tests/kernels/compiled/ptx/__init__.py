"""Compiled kernels executed warp by warp, without a GPU: translation, memory, schedules, ranks."""
