"""Which rank a process is and on which node, read from its launcher's environment."""
