"""Times of the whole engine: starts, loading, steps with drafts, full and overlapped steps."""
