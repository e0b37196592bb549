"""Which rows of the residual stream an exchange over peer memory leaves on this rank."""


def owned_rows(exchange, rows: int) -> list[range]:
    """The rows of h that this rank gets in a step of `rows` rows."""
    owned, world = [], exchange._world
    for piece in exchange.layout.pieces(rows):
        if exchange.takes_one_shot(len(piece)):
            owned.append(piece)
        else:
            share = -(-len(piece) // world.size)
            owned.append(piece[world.rank * share : (world.rank + 1) * share])
    return owned
