"""What a product takes by a tile: one formula, the measured costs of tiles, the static choices."""
