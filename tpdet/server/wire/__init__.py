"""What every process of a server knows: messages, limits, errors as clients see them."""
