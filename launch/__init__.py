"""Starts ranks, finds, signals and ends them. Standard library only, except for submitit."""

from tpdet.launch.start.submission import submit

__all__ = ["submit"]
