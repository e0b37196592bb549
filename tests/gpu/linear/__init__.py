"""The gated delta rule on a GPU: what its operands' dtypes cost and lose, its bits, its times."""
