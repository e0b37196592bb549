"""Layers: each owns its shard rule, its loading and its collective."""
