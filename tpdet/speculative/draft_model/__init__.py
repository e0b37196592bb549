"""A second model that proposes drafts: its copies of sequences, its steps and its start."""
