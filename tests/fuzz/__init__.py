"""The semantics fuzzer: random requests keep their bits in random company."""
