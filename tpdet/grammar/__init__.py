"""Answers that follow a JSON schema: which token ids may follow the tokens so far."""
