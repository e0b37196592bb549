"""Rank 0's side of a server: the bridge to the HTTP process, start, reload, canary, drain."""
