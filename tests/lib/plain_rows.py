"""`RowParams` by columns."""

from tpdet.kernels.inputs.plain_rows import PlainRows, pack_row


def plain_rows(how):
    """Params without bias, penalties and lists of ids, by columns."""
    of = [(it.seed, it.choice, it.temperature, it.top_k, it.top_p, it.min_p) for it in how]
    return PlainRows(b"".join(pack_row(*each) for each in of), [it.position for it in how])
