"""Row products of the committed shape table, as start-up tries them, on a GPU."""

import time

import torch

from tpdet.kernels import order
from tpdet.kernels.cuda.gemm import admission, leaf_trials, trial_data
from tpdet.kernels.cuda.gemm import leaf as leaf_gemm
from tpdet.kernels.inputs.product import Product, write_roots
from tpdet.tools.tune.shapes import tuned_products, tuned_row_products

LEAVES = 8


def the_table_is_admitted():
    """All of one model's products on one GPU within two seconds, once they are compiled."""
    device, limits = (
        torch.device("cuda", torch.cuda.current_device()),
        {"column": 8192, "head": 256},
    )
    rows = tuned_row_products(["qwen3-8b"], (1, 2, 4))
    mine = tuned_products(["qwen3-8b"], (1,)) + tuned_row_products(["qwen3-8b"], (1,), ("pairs",))
    admission.check(mine, device, limits)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    found = admission.check(mine, device, limits)
    torch.cuda.synchronize()
    took = time.perf_counter() - begin
    if found.not_in_table or took > 2.0:
        raise AssertionError(f"{took:.1f} s for {found}")
    everything = admission.check(rows, device, limits)
    return f"{took:.2f} s: {found}; all rows: {everything}"


def another_order_is_found():
    """Negative control: sums of one order are refused where another was asked for."""
    device = torch.device("cuda", torch.cuda.current_device())
    orders = {name: (order.fold_tree(name, LEAVES),) for name in order.FOLD_ORDERS}
    for kind in trial_data.KINDS:
        for asked, roots in orders.items():
            product = Product("row", 1024, 512, LEAVES, write_roots(roots))
            x = trial_data.trial_rows(kind, 300, LEAVES * 512, device)
            w = leaf_trials.trial_leaves(kind, product, device)
            wanted = leaf_trials.wanted_roots(x, w, product, admission.REFERENCE)
            for name, tree in orders.items():
                sums = leaf_gemm.leaf_sums(x, w, tree)
                if bool(leaf_trials.differs(sums, wanted)) != (name != asked):
                    raise AssertionError(f"{kind}: {name} where {asked} was asked for")
