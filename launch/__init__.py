"""How ranks are started, found, signalled and ended. Standard library only, but for submitit."""

from tpdet.launch.start.submission import submit

__all__ = ["submit"]
