"""Paged attention: decode, prefill, and the merge of splits."""
