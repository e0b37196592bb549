"""How ranks are started, found, signalled and ended. Standard library only."""
