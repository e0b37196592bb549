"""How ranks are started, found, signalled and ended. Standard library only, but for submitit."""

from tpdet.launch.ranks.submission import submit

__all__ = ["submit"]
