"""CUDA graphs: steps that are captured at start and replayed."""
