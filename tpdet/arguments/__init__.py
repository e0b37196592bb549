"""What users write, checked: command lines, sampling parameters, vLLM's names for them."""
