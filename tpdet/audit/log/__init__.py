"""A Merkle log on disk: RFC 9162 trees, C2SP tiles and signed checkpoints, a durable writer."""
