"""The cache of answers: what was computed once is not computed again, and has the same bits."""
