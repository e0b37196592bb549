"""Receipts and replay digests: short names for the bits of an answer."""
