"""`tpdet tune`: measures variants of the products and writes the shape table."""
