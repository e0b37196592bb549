"""The format of the file of raw logits: for each position a header, then the vocabulary's fp32."""

HEADER_BYTES = 32


def position_header(name: str, position: int) -> bytes:
    """The 32 bytes before a position's values: the probe's name and the position."""
    return f"{name}@{position}".encode().ljust(HEADER_BYTES)


NO_POSITION = b"refused".ljust(HEADER_BYTES)
"""Before values that are no part of an answer."""
