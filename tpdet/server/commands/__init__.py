"""The commands of an operator: serve with a supervisor, stop, reload, launch."""
