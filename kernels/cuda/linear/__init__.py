"""Linear attention on a GPU: short convolution, gated delta rule, norm of its outputs."""
