"""The file of raw logits that a verification world leaves: a header and a vocabulary a position."""

HEADER_BYTES = 32


def position_header(name: str, position: int) -> bytes:
    """32 bytes before each position's raw values: probe name and position."""
    return f"{name}@{position}".encode().ljust(HEADER_BYTES)
