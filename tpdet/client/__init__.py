"""Clients in the terminal: `tpdet chat`, `tpdet complete` and `tpdet run-batch`."""
