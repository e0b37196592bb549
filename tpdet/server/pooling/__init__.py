"""The routes of models that pool: vectors, labels, scores and ranks."""
