"""Bits of the GPU's kernels of experts: every row held against the dense product of its expert."""

import torch

from tests.gpu.checks import draw, same, surrounded
from tests.gpu.suite import Check
from tpdet.kernels.cuda.experts.gather import rows_in_slots
from tpdet.kernels.cuda.experts.places import place
from tpdet.kernels.cuda.experts.products import grouped_product
from tpdet.kernels.cuda.experts.tiles import CANDIDATES
from tpdet.kernels.cuda.gemm.column import column_gemm
from tpdet.kernels.cuda.gemm.gated import gated_gemm
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.launch.multiprocessors import multiprocessors

GPU = torch.device("cuda", 0)


def routes(tokens, chosen, experts, seed=0, skew=0.0):
    """Ids int32 [tokens, chosen], ascending; skew: how much likelier low ids are."""
    generator = torch.Generator("cuda").manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator, device="cuda")
    scores -= skew * torch.arange(experts, device="cuda") / experts
    return scores.topk(chosen, dim=1).indices.sort(dim=1).values.int()


def by_slots(x, weights, bias, ids, experts, tile, spread):
    """Both products of a layer [S, H], and where its rows stand."""
    places = place(ids, experts, tile.rows, spread)
    rows = x if spread else rows_in_slots(x, places)
    gate_up, down = weights
    sms = multiprocessors(x.device)
    up_tile, down_tile = (fitted(tile, w) for w in weights)
    mixed = grouped_product(rows, gate_up, None, places, up_tile, sms, "silu", spread)
    return grouped_product(mixed, down, bias, places, down_tile, sms), places


def fitted(tile, weight):
    """The tile, or one that takes any weight."""
    if weight.element_size() == 2 and weight.shape[2] % tile.depth == 0:
        return tile
    return Tile(tile.rows, 32, 16, 4, 3, "pointer_swapped")


def rows_are_those_of_dense_products(x, weights, bias, ids, experts, tile, spread, what):
    """Of each expert the rows that chose it, by both dense products."""
    y, places = by_slots(x, weights, bias, ids, experts, tile, spread)
    slots = places.slots
    if not torch.equal(slots >= 0, (ids >= experts.start) & (ids < experts.stop)):
        raise AssertionError(f"{what}: a choice without its slot")
    taken = slots[slots >= 0]
    if taken.unique().numel() != taken.numel():
        raise AssertionError(f"{what}: two choices in one slot")
    for expert in range(len(experts)):
        token, choice = (ids == experts.start + expert).nonzero(as_tuple=True)
        if len(token):
            mixed = gated_gemm(x[token], weights[0][expert])
            wanted = column_gemm(mixed, weights[1][expert], bias[expert], x.dtype)
            same(y[slots[token, choice].long()], wanted, f"{what} expert {expert}")


def tiles_are_one_class(hidden, width, kind, dtype=torch.bfloat16, skew=0.0):
    """Every candidate; all experts, and the upper half of them; rows that are padding."""
    count, chosen, cases = 16, 4, 0
    gate_up = draw(count, 2 * width, hidden, dtype=dtype, kind=kind, seed=1) * 0.02
    down = draw(count, hidden, width, dtype=dtype, kind=kind, seed=2) * 0.02
    bias = draw(count, hidden, dtype=dtype, seed=3)
    for bucket in CANDIDATES:
        for tokens in dict.fromkeys((1, bucket.tokens // 2, min(bucket.tokens, 700))):
            x = draw(tokens, hidden, dtype=dtype, kind=kind)
            ids = routes(tokens, chosen, count, tokens, skew)
            ids[tokens - tokens // 3 :] = -1  # padding
            for tile in bucket.tiles:
                if tokens > tile.rows and bucket.spread:
                    continue
                for experts in (range(count), range(8, count)):
                    weights = gate_up[experts.start :], down[experts.start :]
                    what = f"{hidden} {width} {tokens} tokens {experts} {tile}"
                    case = ids, experts, tile, bucket.spread
                    shift = bias[experts.start :]
                    rows_are_those_of_dense_products(x, weights, shift, *case, what)
                    cases += 1
    return {"cases": cases}


def poison_stays_in_its_row():
    """NaN rows, NaN around operands, slots of no row: no other row changes."""
    weights = draw(16, 512, 512, seed=1) * 0.02, draw(16, 512, 256, seed=2) * 0.02
    bias = draw(16, 512, seed=3)
    around = tuple(surrounded(w) for w in weights)
    for bucket in CANDIDATES:
        tokens = min(bucket.tokens, 300)
        x, ids = draw(tokens, 512), routes(tokens, 4, 16)
        bad = x.clone()
        bad[::3] = torch.nan
        for tile in bucket.tiles:
            if tokens > tile.rows and bucket.spread:
                continue
            case = ids, range(16), tile, bucket.spread
            clean, before = by_slots(x, weights, bias, *case)
            dirty, after = by_slots(surrounded(bad), around, bias, *case)
            clean, dirty = (y[p.slots.long()] for y, p in ((clean, before), (dirty, after)))
            if not dirty[::3].isnan().all():
                raise AssertionError(f"{tile}: NaN rows are lost")
            keep = [row for row in range(tokens) if row % 3]
            same(dirty[keep], clean[keep], f"{tile}")


def checks():
    """Every check of the kernels of experts."""
    bf16, half, single = torch.bfloat16, torch.float16, torch.float32
    cases = {
        "30b": (2048, 768, "heavy"),
        "2880": (2880, 2880, "normal"),
        "cut": (2048, 192, "cancelling"),
        "skewed": (512, 512, "normal", bf16, 3.0),
        "odd": (208, 80, "heavy"),
        "float16": (272, 192, "heavy", half),
        "float32": (272, 192, "heavy", single),
    }
    found = [Check(f"experts {name}", tiles_are_one_class, case) for name, case in cases.items()]
    return [*found, Check("experts poison", poison_stays_in_its_row)]
