"""Linear attention on the CPU: the short convolution and the gated delta rule."""
