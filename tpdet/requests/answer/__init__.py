"""An answer becomes JSON: its choices, its scores, its receipt, written in pieces."""
