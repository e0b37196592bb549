"""The CPU path: every operation of the contract on torch CPU tensors, its own bit class."""
