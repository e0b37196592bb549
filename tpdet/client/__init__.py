"""Clients in the terminal: `tpdet chat`, `tpdet complete` and `tpdet run-batch`."""

DEFAULT_URL = "http://127.0.0.1:8000"
"""Where `tpdet serve` listens by default."""
