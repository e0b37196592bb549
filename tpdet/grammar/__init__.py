"""Answers that follow a JSON schema: which token ids may come next, from the tokens so far."""
