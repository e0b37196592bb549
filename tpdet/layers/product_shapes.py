"""Which products a rank runs: what the shape table is asked for, and what `tpdet tune` measures."""

from tpdet.kernels.cuda.gemm.choice.shape_table import Product, write_roots
from tpdet.kernels.partial_sums import relative_roots
from tpdet.layers.partition import Partition
from tpdet.layers.row_layers import row_rule


def rank_products(partition: Partition) -> tuple[Product, ...]:
    """A rank's distinct products in total order: columns, the head, rows with leaves and roots.

    Alike on every rank of a world, but for the roots.
    """
    config, mine = partition.config, len(partition.mine)
    hidden, query = config.hidden_size, partition.query_heads * config.head_dim
    key = len(partition.key_heads) * config.head_dim
    feed_forward = config.intermediate_size // partition.leaves
    sent = partition.plan.roots[partition.world.rank]
    roots = write_roots(relative_roots(sent, partition.mine.start))
    rule = row_rule(partition)

    def row_product(inputs: int) -> Product:
        leaves, n, k = rule.extents(partition, (hidden, inputs))
        return Product(rule.kind, n, k, leaves, roots if rule.kind == "row" else "")

    return tuple(
        sorted(
            {
                Product("column", query + 2 * key, hidden),
                Product("column", 2 * feed_forward * mine, hidden),
                Product("head", partition.vocabulary_share * mine, hidden),
                row_product(config.num_heads * config.head_dim),
                row_product(config.intermediate_size),
            }
        )
    )
