"""vLLM's names, so that a script written for it runs with `vllm` replaced by `tpdet`."""
