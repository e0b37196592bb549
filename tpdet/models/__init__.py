"""Models: which layers, in which order. No rank arithmetic here."""
