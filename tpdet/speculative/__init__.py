"""Drafters: what may follow a sequence's tokens, and whether verifying it is expected to pay.

Only rank 0 drafts, and no draft can change an answer (docs/drafts.md). Imports no torch.
"""
