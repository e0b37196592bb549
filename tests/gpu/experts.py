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


def by_slots(x, w, bias, ids, experts, tile, spread, activation=""):
    """One grouped product, and where its rows stand."""
    places = place(ids, experts, tile.rows, spread)
    rows = x if spread else rows_in_slots(x, places)
    sms = multiprocessors(x.device)
    return grouped_product(rows, w, bias, places, tile, sms, activation, spread), places


def rows_are_those_of_dense_products(x, w, bias, ids, experts, tile, spread, activation, what):
    y, places = by_slots(x, w, bias, ids, experts, tile, spread, activation)
    slots = places.slots
    if not torch.equal(slots >= 0, (ids >= experts.start) & (ids < experts.stop)):
        raise AssertionError(f"{what}: a choice without its slot")
    taken = slots[slots >= 0]
    if taken.unique().numel() != taken.numel():
        raise AssertionError(f"{what}: two choices in one slot")
    for expert in ids.unique().tolist():
        if expert not in experts:
            continue
        token, choice = (ids == expert).nonzero(as_tuple=True)
        mine, weight = x[token].contiguous(), w[expert - experts.start]
        if activation:
            wanted = gated_gemm(mine, weight)
        else:
            shift = None if bias is None else bias[expert - experts.start]
            wanted = column_gemm(mine, weight, shift, x.dtype)
        same(y[slots[token, choice].long()], wanted, f"{what} expert {expert}")


def tiles_are_one_class(n, k, kind, dtype=torch.bfloat16, skew=0.0):
    """Every candidate, gated and with a bias; all experts, and the upper half of them."""
    count, chosen, cases = 16, 4, 0
    w = draw(count, n, k, dtype=dtype, kind=kind, seed=1)
    bias = draw(count, n, dtype=dtype, seed=2)
    for bucket in CANDIDATES:
        for tokens in dict.fromkeys((1, bucket.tokens // 2, min(bucket.tokens, 700))):
            x = draw(tokens, k, dtype=dtype, kind=kind)
            ids = routes(tokens, chosen, count, tokens, skew)
            ids[tokens - tokens // 3 :] = -1  # padding
            for tile in bucket.tiles:
                if tokens > tile.rows and bucket.spread:
                    continue
                if dtype == torch.float32 or k % tile.depth:
                    tile = Tile(tile.rows, 32, 16, 4, 3, "pointer_swapped")
                for experts in (range(count), range(8, count)):
                    mine = w[experts.start :].contiguous()
                    shift = bias[experts.start :].contiguous()
                    what = f"{n}x{k} {tokens} tokens {experts} {tile}"
                    case = ids, experts, tile, bucket.spread
                    rows_are_those_of_dense_products(x, mine, shift, *case, "", what)
                    rows_are_those_of_dense_products(x, mine, None, *case, "silu", what)
                    cases += 2
    return {"cases": cases}


def poison_stays_in_its_row():
    """NaN rows, NaN around operands, slots of no row: no other row changes."""
    w = draw(16, 256, 512, seed=1)
    for bucket in CANDIDATES:
        tokens = min(bucket.tokens, 300)
        x, ids = draw(tokens, 512), routes(tokens, 4, 16)
        bad = x.clone()
        bad[::3] = torch.nan
        for tile in bucket.tiles:
            if tokens > tile.rows and bucket.spread:
                continue
            case = ids, range(16), tile, bucket.spread
            clean, before = by_slots(x, w, None, *case)
            dirty, after = by_slots(surrounded(bad), surrounded(w), None, *case)
            clean, dirty = (y[p.slots.long()] for y, p in ((clean, before), (dirty, after)))
            if not dirty[::3].isnan().all():
                raise AssertionError(f"{tile}: NaN rows are lost")
            keep = [row for row in range(tokens) if row % 3]
            same(dirty[keep], clean[keep], f"{tile}")


def checks():
    """Every check of the kernels of experts."""
    found = [
        Check(f"experts {n}x{k} {kind}", tiles_are_one_class, (n, k, kind))
        for n, k, kind in ((1536, 2048, "heavy"), (2048, 768, "normal"), (5760, 2880, "normal"))
    ]
    found.append(Check("experts 2880x2880", tiles_are_one_class, (2880, 2880, "cancelling")))
    found.append(
        Check("experts skewed", tiles_are_one_class, (512, 512, "normal", torch.bfloat16, 3.0))
    )
    found.append(Check("experts odd", tiles_are_one_class, (208, 80, "heavy")))
    for dtype in (torch.float16, torch.float32):
        found.append(Check(f"experts {dtype}", tiles_are_one_class, (272, 192, "heavy", dtype)))
    found.append(Check("experts poison", poison_stays_in_its_row))
    return found
