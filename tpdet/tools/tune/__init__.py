"""`tpdet tune`: measures variants of the products and writes the shape table."""

from tpdet.kernels.inputs.product import KINDS

EXPERTS = "experts"
"""Both products of a layer's experts, which are tuned together."""
TUNED_KINDS = (*KINDS, EXPERTS)
"""What `tpdet tune --kinds` may name."""
