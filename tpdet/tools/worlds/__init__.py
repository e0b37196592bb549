"""What the tools share: starting a world of ranks, its ways, its machine and its specification."""
