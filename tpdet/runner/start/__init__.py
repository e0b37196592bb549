"""Start: everything that happens once before a rank steps."""
