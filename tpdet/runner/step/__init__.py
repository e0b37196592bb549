"""The parts of one step: its rows, the samplers of its logits, the wait for the GPU."""
