"""Signed receipts of answers: statements, keys, content, bundles, and how they are checked."""
