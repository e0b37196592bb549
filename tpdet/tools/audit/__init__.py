"""`tpdet audit`: keys, and what a stranger does with receipts. Needs no torch."""
