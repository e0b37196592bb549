"""Speculative decoding: what may follow a sequence's tokens, and where verifying it should pay.

Only rank 0 drafts, and no draft can change an answer (docs/speculative.md). Imports no torch.
"""
