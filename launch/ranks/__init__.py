"""Which rank a process is, and on which node, as its launcher's environment says."""
