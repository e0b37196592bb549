"""Checks of the kernels against known digests, on the device that serves."""
