"""Which rows of the residual stream an exchange over peer memory leaves on a rank."""


def owned_rows(exchange, rows: int, rank: int, ranks: int) -> list[range]:
    """The rows of h that a rank gets in a step of `rows` rows."""
    owned = []
    for piece in exchange.layout.pieces(rows):
        if exchange.takes_one_shot(len(piece)):
            owned.append(piece)
        else:
            share = -(-len(piece) // ranks)
            owned.append(piece[rank * share : (rank + 1) * share])
    return owned
