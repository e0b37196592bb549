"""Which variant of a product runs: variants, candidates, the shape table, the library."""
