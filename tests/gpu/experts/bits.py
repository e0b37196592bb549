"""Bits of the GPU's kernels of experts: every row held against the dense product of its expert."""

from dataclasses import replace

import torch

from tests.gpu.lib.checks import draw, same, surrounded
from tests.gpu.lib.suite import Check
from tpdet.kernels import order
from tpdet.kernels.cuda.experts.admission import failing_tiles
from tpdet.kernels.cuda.experts.candidates import CANDIDATES
from tpdet.kernels.cuda.experts.gather import rows_in_blocks
from tpdet.kernels.cuda.experts.lane_admission import failing_lanes
from tpdet.kernels.cuda.experts.products import grouped_product
from tpdet.kernels.cuda.experts.router import route
from tpdet.kernels.cuda.experts.sorted_tokens import sort_tokens
from tpdet.kernels.cuda.experts.sums import Lanes, expert_sums
from tpdet.kernels.cuda.experts.tiles import ExpertWeight
from tpdet.kernels.cuda.gemm.column import column_gemm
from tpdet.kernels.cuda.gemm.gated import gated_gemm
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.hardware import gpu_of
from tpdet.kernels.cuda.launch.multiprocessors import multiprocessors
from tpdet.kernels.cuda.pointwise.fold import fold_final
from tpdet.kernels.inputs.experts import Routing, SharedForm
from tpdet.kernels.inputs.gated import gate_and_up
from tpdet.kernels.inputs.product import Product
from tpdet.kernels.known.expert_golden import EXPERT_GOLDEN_SHA256, expert_golden_digest
from tpdet.kernels.partial_sums import relative_roots

GPU = torch.device("cuda", 0)


def routes(tokens, chosen, experts, seed=0, skew=0.0):
    """Ids int32 [tokens, chosen], ascending; skew: how much likelier low ids are."""
    generator = torch.Generator("cuda").manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator, device="cuda")
    scores -= skew * torch.arange(experts, device="cuda") / experts
    return scores.topk(chosen, dim=1).indices.sort(dim=1).values.int()


def spans_of(rows):
    """Of so many rows: the first alone, then the others, then a sequence without rows."""
    return torch.tensor([[0, 1, 7], [1, rows - 1, 0], [0, 0, 0]], dtype=torch.int32, device="cuda")


def by_experts(x, weights, bias, ids, experts, tile, by_token, shift=None, name="silu"):
    """Both products of a layer [S, H], and where its rows stand; shift: gates' and ups' bias."""
    found = sort_tokens(ids, experts, tile.rows, by_token)
    rows = x if by_token else rows_in_blocks(x, found)
    gate_up, down = weights
    sms = multiprocessors(x.device)
    up_tile, down_tile = fitted(tile, gate_up, True), fitted(tile, down, False)
    mixed = grouped_product(rows, gate_up, shift, found, up_tile, sms, name, by_token)
    return grouped_product(mixed, down, bias, found, down_tile, sms), found


def fitted(tile, weight, gated):
    """The tile, one with a stage less, or one that takes any weight."""
    (_, n, k), size = weight.shape, weight.element_size()
    if tile.variant.startswith("pointer"):
        if size == 2 and k % tile.depth == 0:
            return tile
    else:
        for less in (0, 1):
            shorter = replace(tile, stages=tile.stages - less)
            if ExpertWeight(n, k, size, gated).fits(shorter, gpu_of(weight.device)):
                return shorter
    return Tile(tile.rows, 32, 16, 4, 3, "pointer_swapped")


def rows_are_those_of_dense_products(x, weights, bias, ids, experts, tile, by_token, what):
    """Of each expert the rows that chose it, by both dense products."""
    y, found = by_experts(x, weights, bias, ids, experts, tile, by_token)
    positions = found.positions
    if not torch.equal(positions >= 0, (ids >= experts.start) & (ids < experts.stop)):
        raise AssertionError(f"{what}: a choice without its row")
    taken = positions[positions >= 0]
    if taken.unique().numel() != taken.numel():
        raise AssertionError(f"{what}: two choices in one row")
    for expert in range(len(experts)):
        token, choice = (ids == experts.start + expert).nonzero(as_tuple=True)
        if len(token):
            mixed = gated_gemm(x[token], weights[0][expert])
            wanted = column_gemm(mixed, weights[1][expert], bias[expert], x.dtype)
            same(y[positions[token, choice].long()], wanted, f"{what} expert {expert}")


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
                if tokens > tile.rows and bucket.by_token:
                    continue
                for experts in (range(count), range(8, count)):
                    weights = gate_up[experts.start :], down[experts.start :]
                    what = f"{hidden} {width} {tokens} tokens {experts} {tile}"
                    case = ids, experts, tile, bucket.by_token
                    shift = bias[experts.start :]
                    rows_are_those_of_dense_products(x, weights, shift, *case, what)
                    cases += 1
    return {"cases": cases}


def clamped_gates_are_one_class(hidden, width):
    """Every tile with both biases and the gate of gpt-oss: equal rows, near those of fp64."""
    count, error = 8, 0.0
    gate_up, down = draw(count, 2 * width, hidden) * 0.05, draw(count, hidden, width, seed=1) * 0.02
    shift, bias = draw(count, 2 * width, seed=2), draw(count, hidden, seed=3)
    for bucket in CANDIDATES:
        tokens, known = min(bucket.tokens, 300), None
        x, ids = draw(tokens, hidden, seed=4), routes(tokens, 2, count)
        case = (gate_up, down), bias, ids, range(count)
        for tile in bucket.tiles:
            if tokens > tile.rows and bucket.by_token:
                continue
            ways = tile, bucket.by_token, shift, "clamped"
            y, found = by_experts(x, *case, *ways)
            rows = y[found.positions.long()]
            known = rows if known is None else known
            same(rows, known, f"{hidden} {width} {tokens} tokens {tile}")
        for expert in range(count):
            token, choice = (ids == expert).nonzero(as_tuple=True)
            wide = x[token].double() @ gate_up[expert].double().T + shift[expert].double()
            gate, up = gate_and_up(wide)
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            mixed = (up + 1.0) * gate * torch.sigmoid(1.702 * gate)
            exact = mixed @ down[expert].double().T + bias[expert].double()
            if len(token):
                apart = (known[token, choice] - exact).abs().max() / exact.abs().max()
                error = max(error, apart.item())
    if error > 2e-2:
        raise AssertionError(f"relative error {error:.2e}")
    return {"value": error, "unit": "relative error", "limit": 2e-2}


def poison_stays_in_its_row():
    """NaN rows, NaN around operands, rows of no token: no other row changes."""
    weights = draw(16, 512, 512, seed=1) * 0.02, draw(16, 512, 256, seed=2) * 0.02
    bias = draw(16, 512, seed=3)
    around = tuple(surrounded(w) for w in weights)
    for bucket in CANDIDATES:
        tokens = min(bucket.tokens, 300)
        x, ids = draw(tokens, 512), routes(tokens, 4, 16)
        bad = x.clone()
        bad[::3] = torch.nan
        for tile in bucket.tiles:
            if tokens > tile.rows and bucket.by_token:
                continue
            case = ids, range(16), tile, bucket.by_token
            clean, before = by_experts(x, weights, bias, *case)
            dirty, after = by_experts(surrounded(bad), around, bias, *case)
            clean, dirty = (y[p.positions.long()] for y, p in ((clean, before), (dirty, after)))
            if not dirty[::3].isnan().all():
                raise AssertionError(f"{tile}: NaN rows are lost")
            keep = [row for row in range(tokens) if row % 3]
            same(dirty[keep], clean[keep], f"{tile}")


def dense_lanes(x, ids, weights, layer, lanes):
    """The lanes of all tokens [L, M, H] by dense products and torch's additions, ids ascending."""
    gate_up, down, bias = layer
    finished = torch.zeros(*ids.shape, x.shape[1], device=x.device)
    for expert in range(len(gate_up)):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        if len(token):
            mixed = gated_gemm(x[token], gate_up[expert])
            y = column_gemm(mixed, down[expert], bias[expert], x.dtype)
            finished[token, choice] = weights[token, choice][:, None] * y.float()
    sums = torch.zeros(lanes, *x.shape, device=x.device)
    lane = ids.div(len(gate_up) // lanes, rounding_mode="floor")
    for choice in range(ids.shape[1]):
        for index in range(lanes):
            mine = (lane[:, choice] == index)[:, None]
            sums[index] = torch.where(mine, sums[index] + finished[:, choice], sums[index])
    return sums


def sums_do_not_know_where_experts_live(dtype, hidden, width):
    """Every fold order at 1, 2, 4 and 8 ranks; steps of every bucket with padding and NaN."""
    count, chosen, lanes = 32, 4, 8
    gate_up = draw(count, 2 * width, hidden, dtype=dtype, seed=1) * 0.05
    down = draw(count, hidden, width, dtype=dtype, seed=2) * 0.05
    bias = draw(count, hidden, dtype=dtype, seed=3)
    for tokens in (1, 3, 16, 17, 64, 200, 600, 1500):
        x = draw(tokens, hidden, dtype=dtype)
        logits = draw(tokens, count, dtype=torch.float32, seed=tokens)
        x[tokens // 2, 0] = torch.nan if tokens > 3 else 1.0
        logits[tokens - tokens // 3 :] = torch.nan
        spans = spans_of(tokens - tokens // 3)
        ids, weights, _ = route(logits, None, spans, Routing(count, chosen), range(count))
        each = dense_lanes(x, ids, weights, (gate_up, down, bias), lanes)
        for name in order.FOLD_ORDERS:
            tree = order.fold_tree(name, lanes)
            wanted = order.evaluate(tree, lambda lane, each=each: each[lane], torch.add)
            for ranks in (1, 2, 4, 8):
                plan, share = order.fold_plan(name, lanes, ranks), count // ranks
                sent = torch.zeros(ranks, plan.slots, tokens, hidden, device=x.device)
                for rank, roots in enumerate(plan.roots):
                    mine = range(rank * share, (rank + 1) * share)
                    part = slice(mine.start, mine.stop)
                    weigh = gate_up[part], down[part], (None, bias[part])
                    fold = Lanes(mine, count, lanes // ranks, relative_roots(roots))
                    own = route(logits, None, spans, Routing(count, chosen), mine)
                    asked = x, own.ids, own.weights, *weigh, fold
                    sums = expert_sums(*asked, sorted_tokens=own.sorted_tokens)
                    sent[rank, : len(roots)] = sums.values
                total = fold_final(sent, plan.final)
                same(total, wanted, f"{tokens} tokens {name} {ranks} ranks")


def choices_are_those_of_a_stable_sort():
    """Ties, NaN, infinities, zeros of both signs; weights sum to one; padding chooses nobody."""
    for experts, chosen in ((128, 8), (60, 4), (512, 10), (8, 2), (32, 4), (3, 3)):
        logits = draw(257, experts, dtype=torch.float32, seed=experts).mul(4).round().div(4)
        logits[0, ::2], logits[1], logits[2, 1::3] = torch.nan, 0.0, -torch.inf
        logits[3, ::2], logits[3, 1::2] = -0.0, 0.0
        spans = spans_of(200)
        ids, weights, _ = route(logits, None, spans, Routing(experts, chosen), range(experts))
        few = route(logits[:4], None, spans_of(3), Routing(experts, chosen), range(experts))
        same(few.ids[:3], ids[:3], "ids of few rows")
        same(few.weights[1:3], weights[1:3], "weights of few rows")
        if few.sorted_tokens is None or not (few.sorted_tokens.positions[3] == -1).all():
            raise AssertionError(f"{experts} experts: a padding row of few has a place")
        scores = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-3e38).add(0.0)
        best = scores.neg().sort(dim=1, stable=True).indices[:, :chosen].sort(dim=1).values
        if not torch.equal(ids[:200], best[:200].int()):
            raise AssertionError(f"{experts} experts: other ids than a stable sort's")
        if not (ids[200:] == -1).all() or weights[200:].any():
            raise AssertionError(f"{experts} experts: padding rows chose somebody")
        wanted = logits[1:200].double().gather(1, best[1:200]).softmax(1)
        error = (weights[1:200] - wanted).abs().max().item()
        if not error < 2e-6:
            raise AssertionError(f"{experts} experts: weights {error:.1e} beside fp64's")


def a_graph_follows_its_routes():
    """Captured once; other rows, routes and counts of real rows are replayed from it."""
    count, chosen, lanes = 32, 4, 8
    gate_up, down = draw(count, 512, 256, seed=1) * 0.05, draw(count, 256, 256, seed=2) * 0.05
    fold = Lanes(range(count), count, lanes, (order.fold_tree("tree", lanes),))
    for tokens in (4, 16, 64, 600):
        x, spans = draw(tokens, 256), spans_of(tokens)
        logits = draw(tokens, count, dtype=torch.float32, seed=5)

        def run(x=x, spans=spans, logits=logits):
            ids, weights, found = route(logits, None, spans, Routing(count, chosen), range(count))
            weigh = gate_up, down, (None, None)
            return expert_sums(x, ids, weights, *weigh, fold, sorted_tokens=found).values

        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run()
        for seed in range(4):
            x.copy_(draw(tokens, 256, seed=seed))
            logits.copy_(draw(tokens, count, dtype=torch.float32, seed=20 + seed) + seed)
            spans.copy_(spans_of(tokens - seed))
            graph.replay()
            replayed = found.clone()
            real = tokens - seed
            same(replayed[:, :real], run()[:, :real], f"{tokens} tokens, replay {seed}")


def tiles_are_admitted_at_a_start(dtype):
    """What a start of Qwen3-30B-A3B, gpt-oss and an odd model tries."""
    shapes = (
        ("gated", 1536, 2048),
        ("column", 2048, 768),
        ("gated", 5760, 2880),
        ("column", 208, 80),
    )
    failed = failing_tiles([Product(*shape) for shape in shapes], None, GPU, dtype)
    if failed:
        raise AssertionError("; ".join(failed))


def shared_leaves_join_their_lanes(dtype):
    """Every width that joins, with a gate and without, by every tile of a start."""
    lanes = Lanes(range(16), 16, 8, (order.fold_tree("tree", 8),))
    forms = [
        SharedForm(lanes, leaf, 4, gated) for leaf in (16, 32, 64, 128) for gated in (False, True)
    ]
    failed = [text for form in forms for text in failing_lanes(form, GPU, dtype)]
    if failed:
        raise AssertionError("; ".join(failed))


def golden_vectors_are_those_of_the_cpu():
    """Choices with ties, infinities and NaN; weights; folded lanes."""
    if expert_golden_digest(GPU) != EXPERT_GOLDEN_SHA256:
        raise AssertionError("the golden vectors of experts have another digest here")


def expert_checks():
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
    for dtype, hidden, width in ((bf16, 512, 256), (half, 208, 80), (single, 128, 96)):
        name = f"experts placed {dtype}".replace("torch.", "")
        found.append(Check(name, sums_do_not_know_where_experts_live, (dtype, hidden, width)))
    for dtype in (bf16, half, single):
        name = f"experts admitted {dtype}".replace("torch.", "")
        found.append(Check(name, tiles_are_admitted_at_a_start, (dtype,)))
    for dtype in (bf16, half):
        name = f"experts shared {dtype}".replace("torch.", "")
        found.append(Check(name, shared_leaves_join_their_lanes, (dtype,)))
    for hidden, width in ((2880, 2880), (208, 80)):
        name = f"experts clamped {hidden} {width}"
        found.append(Check(name, clamped_gates_are_one_class, (hidden, width)))
    found.append(Check("experts golden", golden_vectors_are_those_of_the_cpu))
    found.append(Check("experts choice", choices_are_those_of_a_stable_sort))
    found.append(Check("experts graph", a_graph_follows_its_routes))
    return [*found, Check("experts poison", poison_stays_in_its_row)]
