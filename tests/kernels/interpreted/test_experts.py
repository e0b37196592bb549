"""The GPU's kernels of experts in Triton's interpreter, the warp-specialised one emulated."""

import numpy
import pytest
import torch

from tests.kernels.interpreted.emulated.warps import Pointer, Scalar, grouped_product, run_program
from tests.kernels.interpreted.test_gluon_gemm import activate_and_multiply, described
from tests.kernels.product_inputs import draw
from tests.lib.bits import assert_same_bits, same_bits
from tpdet.kernels import order
from tpdet.kernels.cpu.experts.sums import expert_sums as cpu_expert_sums
from tpdet.kernels.cuda import hardware
from tpdet.kernels.cuda.experts import (
    admission,
    lane_admission,
    lane_tiles,
    sorted_tokens,
    streamed_lanes,
)
from tpdet.kernels.cuda.experts import lanes as lane_kernels
from tpdet.kernels.cuda.experts import tiles as expert_tiles
from tpdet.kernels.cuda.experts.gather import rows_in_blocks
from tpdet.kernels.cuda.experts.lane_tiles import LaneTile, tile_for
from tpdet.kernels.cuda.experts.lanes import fold_lanes
from tpdet.kernels.cuda.experts.products import grouped_product as product_of_groups
from tpdet.kernels.cuda.experts.router import route
from tpdet.kernels.cuda.experts.shared_lanes import JoinedForm, fold_lanes_with_shared
from tpdet.kernels.cuda.experts.sums import Lanes, expert_rows, expert_sums, sums_of_rows
from tpdet.kernels.cuda.experts.tiles import ExpertWeight, product_tile
from tpdet.kernels.cuda.gemm.column import column_gemm
from tpdet.kernels.cuda.gemm.gated import gated_gemm
from tpdet.kernels.cuda.gemm.leaf import leaf_gemm
from tpdet.kernels.cuda.gemm.variants import chain, gated, warp_swapped
from tpdet.kernels.cuda.gemm.variants.tile import Tile
from tpdet.kernels.cuda.hardware import NO_GPU
from tpdet.kernels.cuda.launch import warp_pipeline
from tpdet.kernels.cuda.pointwise import activation
from tpdet.kernels.cuda.pointwise import fold as fold_kernels
from tpdet.kernels.cuda.pointwise import gate as gate_kernels
from tpdet.kernels.cuda.pointwise.fold import fold_final
from tpdet.kernels.cuda.pointwise.gate import gate_lanes
from tpdet.kernels.fold_program import own_program
from tpdet.kernels.inputs.activations import EXPERT_ACTIVATIONS
from tpdet.kernels.inputs.experts import Routing, SharedForm
from tpdet.kernels.inputs.gated import gate_and_up
from tpdet.kernels.inputs.product import Product
from tpdet.kernels.inputs.shared_rows import SharedRows
from tpdet.kernels.partial_sums import relative_roots

HEIGHT = 16
FEW = Tile(HEIGHT, 32, 32, 4, 2, "pointer_swapped")
PLAIN = Tile(HEIGHT, 16, 16, 4, 2, "pointer")


def routes(tokens, chosen, experts, padding=0):
    """Ids [tokens, chosen], ascending; the last rows are padding and chose none."""
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(tokens))
    scores[:, -1] = 2.0  # everybody's: more rows than a block
    ids = scores.topk(chosen).indices.sort().values.int()
    ids[tokens - padding :] = -1
    return ids


CASES = [  # tokens, chosen, all experts, this rank's, by_token, choices that one program sorts
    (5, 2, 8, range(8), True, 4096),
    (5, 2, 8, range(4, 8), False, 4096),
    (20, 2, 6, range(6), False, 4096),
    (20, 2, 6, range(2, 6), False, 32),
]


@pytest.mark.parametrize(("tokens", "chosen", "count", "mine", "by_token", "few"), CASES)
def test_every_choice_has_a_row_of_its_expert(
    tokens, chosen, count, mine, by_token, few, monkeypatch
):
    monkeypatch.setattr(sorted_tokens, "ONE_PROGRAM", few)
    ids = routes(tokens, chosen, count, padding=1)
    found = sorted_tokens.sort_tokens(ids, mine, HEIGHT, by_token)
    blocks = found.expert_ids[1 : 1 + int(found.expert_ids[0])].tolist()
    local = (ids >= mine.start) & (ids < mine.stop)
    assert torch.equal(found.positions >= 0, local)
    positions = found.positions[local]
    assert positions.unique().numel() == positions.numel() and int(positions.max()) < found.rows
    experts = torch.tensor(blocks)[positions.long() // HEIGHT] + mine.start
    assert torch.equal(experts.int(), ids[local]) and blocks == sorted(blocks)
    wanted = [-(-int((ids == e).sum()) // (10**9 if by_token else HEIGHT)) for e in mine]
    assert [blocks.count(e) for e in range(len(mine))] == wanted
    if by_token:
        tokens_at = torch.arange(tokens)[:, None].expand(tokens, chosen)[local]
        assert torch.equal(positions.long() % HEIGHT, tokens_at)


@pytest.mark.parametrize(("tokens", "chosen", "count", "mine", "by_token", "few"), CASES[:3])
def test_rows_have_the_bits_of_dense_products_and_lanes_of_their_sums(
    tokens, chosen, count, mine, by_token, few
):
    """A NaN row stays in its rows, and rows of no token reach nothing."""
    ids = routes(tokens, chosen, count, padding=1)
    x, w = draw(tokens, 32, dtype=torch.float16), draw(len(mine), 48, 32, seed=1).half()
    bias, sick = draw(len(mine), 48, seed=2).half(), 2
    x[sick] = torch.nan
    found = sorted_tokens.sort_tokens(ids, mine, HEIGHT, by_token)
    rows = x if by_token else rows_in_blocks(x, found)
    joined = product_of_groups(rows, w, None, found, PLAIN, 0, "silu", by_token)
    again = product_of_groups(rows_in_blocks(x, found), w, None, found, PLAIN, 0, "silu")
    taken = found.positions[found.positions >= 0].long()
    assert_same_bits(again[taken], joined[taken])
    y = product_of_groups(rows, w, bias, found, FEW, 0, "", by_token)
    for expert in mine:
        token, choice = (ids == expert).nonzero(as_tuple=True)
        positions, weight = found.positions[token, choice].long(), w[expert - mine.start]
        dense = column_gemm(x[token], weight, bias[expert - mine.start], x.dtype)
        assert_same_bits(y[positions], dense, f"expert {expert}")
        assert_same_bits(joined[positions], gated_gemm(x[token], weight), f"gated expert {expert}")
    weights, lanes = draw(tokens, chosen, seed=3), 2
    shared = draw(lanes, tokens, 48, seed=4)
    for name in order.FOLD_ORDERS:
        tree = order.fold_tree(name, lanes)
        for roots, beside in (((tree,), None), ((tree,), shared), ((0, 1), None)):
            fold = Lanes(mine, count, lanes, roots)
            sums = fold_lanes(y, ids, weights, found, fold, beside)
            each = lane_sums(y, ids, weights, found.positions, mine, lanes, beside)
            wanted = [order.evaluate(root, lambda i, e=each: e[i], torch.add) for root in roots]
            assert_same_bits(sums.values, torch.stack(wanted), f"{name} {roots}")
            assert sums.folded and not sums.values[:, -1].isnan().any()
            keep = [row for row in range(tokens) if row != sick]
            assert not sums.values[:, keep].isnan().any()


SMALL_TILES = LaneTile(16, 16, 2, 4), LaneTile(16, 32, 4, 1), LaneTile(32, 32, 8, 2)


@pytest.mark.parametrize("tile", SMALL_TILES, ids=str)
@pytest.mark.parametrize(("lanes", "leaf"), [(2, 32), (4, 16)])
def test_lanes_multiply_a_shared_expert_as_if_apart(lanes, leaf, tile):
    """Leaves by `leaf_gemm`, gated and added, have the same bits; a NaN row stays in its row."""
    tokens, width, count, mine = 20, 48, 8, range(4, 8)
    ids = routes(tokens, 2, count, padding=1)
    found = sorted_tokens.sort_tokens(ids, mine, HEIGHT)
    y, weights = draw(found.rows, width).half(), draw(tokens, 2, seed=3)
    mixed = draw(tokens, lanes * leaf, seed=5).half()
    mixed[3] = torch.nan
    down = draw(lanes, width, leaf, seed=6).half()
    scores = draw(tokens, 24, seed=7)
    leaves, gate = leaf_gemm(mixed, down), scores[:, 16:17]
    for name in order.FOLD_ORDERS:
        for roots in ((order.fold_tree(name, lanes),), tuple(range(lanes))):
            fold = Lanes(mine, count, lanes, roots)
            for given in (gate, None):
                apart = leaves if given is None else gate_lanes(leaves, given.contiguous())
                wanted = fold_lanes(y, ids, weights, found, fold, apart)
                shared = SharedRows(mixed, down, given)
                got = fold_lanes_with_shared(y, ids, weights, found, fold, shared, tile)
                assert_same_bits(got.values, wanted.values, f"{name} {roots}")
                assert got.folded and got.values[:, 3].isnan().all()


def stream_emulated(y, ids, weights, found, fold, shared, programs):
    """Every program of `stream_lanes` in turn -> the roots [R, M, N], NaN where nothing is."""
    (tokens, chosen), width = ids.shape, y.shape[1]
    held, _, leaf = shared.down.shape
    sums = torch.full((len(fold.roots), tokens, width), torch.nan)
    mixed, down = streamed_lanes.tile_descriptors(shared.mixed, shared.down)
    arguments = {
        "y": Pointer(y),
        "ids": Pointer(ids),
        "weights": Pointer(weights),
        "positions": Pointer(found.positions),
        "mixed_tiles": described(mixed.base),
        "down_tiles": described(down.base.as_strided(down.shape, down.strides)),
        "gate": Pointer(weights if shared.gate is None else shared.gate),
        "sums": Pointer(sums),
        "rows": Scalar(tokens),
        "width": width,
        "first": fold.experts.start,
        "gate_stride": 1,
        "programs": programs,
        "FORM": JoinedForm(chosen, len(fold.experts) // held, leaf, shared.gate is not None),
        "PROGRAM": own_program(fold.roots),
        "DEPENDENT": False,
    }
    arithmetic = (gate_kernels, fold_kernels, lane_kernels)
    for program in range(-(-tokens // 64) * programs):
        kernel = streamed_lanes.stream_lanes
        run_program(kernel, arithmetic, program, arguments, 1, (warp_pipeline,))
    return sums


STREAMED = [  # this rank's lanes, inputs of a leaf, columns, programs of a block of rows
    (8, 16, 192, 2),
    (2, 32, 64, 1),
    (1, 64, 128, 1),
]


@pytest.mark.parametrize(("lanes", "leaf", "width", "programs"), STREAMED)
def test_lanes_of_many_rows_have_the_bits_of_leaves_apart(lanes, leaf, width, programs):
    """Two blocks of rows, with padding; every fold order; sums that are no finite number."""
    tokens, count, mine = 70, 16, range(4, 12)
    ids = routes(tokens, 4, count, padding=1)
    found = sorted_tokens.sort_tokens(ids, mine, HEIGHT)
    y, weights = draw(found.rows, width).half(), draw(tokens, 4, seed=3)
    mixed = draw(tokens, lanes * leaf, seed=5).half()
    down = draw(lanes, width, leaf, seed=6).half()
    gate = draw(tokens, 1, seed=7)
    for spoilt in (False, True):
        if spoilt:
            mixed[3], y[found.positions[2].max(), 5] = torch.nan, torch.inf
            weights[1, 1:] = torch.tensor([torch.nan, -torch.inf, 3e38])
        leaves = leaf_gemm(mixed, down)
        for number, name in enumerate(order.FOLD_ORDERS):
            roots = tuple(range(lanes)) if number == 1 else (order.fold_tree(name, lanes),)
            given = None if number == 2 else gate
            fold = Lanes(mine, count, lanes, roots)
            apart = leaves if given is None else gate_lanes(leaves, gate)
            wanted = fold_lanes(y, ids, weights, found, fold, apart)
            shared = SharedRows(mixed, down, given)
            got = stream_emulated(y, ids, weights, found, fold, shared, programs)
            assert_same_bits(got, wanted.values, f"{name} {roots} {spoilt}")
            assert bool(got.isfinite().all()) != spoilt


def test_programs_that_stay_take_many_rows_that_fit():
    """Layers of Qwen3.5-35B-A3B fit at TP 1 and 2; programs come in as few rounds as can be."""
    cpu, streams = torch.device("cpu"), lane_tiles.streams
    assert not streams(2048, 8, 64, 8, cpu), "the interpreter knows no such programs"
    with hardware.pretending(hardware.H200):
        assert streams(2048, 8, 64, 8, cpu) and streams(2048, 4, 64, 8, cpu)
        for unlike in (
            (2080, 8, 64, 8),
            (2048, 8, 128, 8),
            (2048, 6, 64, 8),
            (2048, 8, 64, 16),
            (2048, 4, 64, 10),
            (2048, 16, 16, 4),
        ):
            assert not streams(*unlike, cpu)
    assert tile_for(129, True).streamed and not tile_for(128, True).streamed
    assert not tile_for(129).streamed and lane_tiles.tiles(True)[:-1] == lane_tiles.tiles()
    programs = lane_tiles.programs_of_rows
    assert [programs(blocks, 32, 132) for blocks in (3, 32, 128, 256)] == [32, 4, 1, 1]


def test_tiles_of_lanes_are_tried_beside_leaves_apart(monkeypatch):
    lanes = Lanes(range(4, 8), 8, 2, ((0, 1),))
    form, cpu = SharedForm(lanes, 32, 2, True), torch.device("cpu")
    monkeypatch.setattr(lane_admission, "tiles", lambda streamed: SMALL_TILES[: 2 + streamed])
    assert lane_admission.failing_lanes(form, cpu, torch.float16) == []
    assert lane_admission.failing_lanes(None, cpu, torch.float16) == []
    monkeypatch.setattr(lane_admission, "gate_lanes", lambda sums, gate: sums)
    failed = lane_admission.failing_lanes(form, cpu, torch.float16)
    assert len(failed) == 2 and failed[0].startswith("lanes with 2 leaves of 32 LaneTile(")
    assert lane_admission.failing_lanes(form, cpu, torch.float32) == [], "leaves stay apart"


def test_a_shared_expert_that_does_not_fit_is_refused():
    ids = routes(5, 2, 8)
    found = sorted_tokens.sort_tokens(ids, range(8), HEIGHT)
    y, weights, fold = draw(found.rows, 48).half(), draw(5, 2), Lanes(range(8), 8, 2, ((0, 1),))
    mixed, down, gate = draw(5, 64).half(), draw(2, 48, 32).half(), draw(5, 1)
    assert {tile_for(1), tile_for(1 << 20)} < {*lane_tiles.tiles()}
    for bad in (
        SharedRows(mixed[:4], down, gate),
        SharedRows(mixed.float(), down.float(), gate),
        SharedRows(mixed.bfloat16(), down, gate),
        SharedRows(mixed[:, :48].contiguous(), down[:, :, :24].contiguous(), gate),
        SharedRows(mixed, down.transpose(1, 2).contiguous().transpose(1, 2), gate),
        SharedRows(mixed, down, gate.half()),
        SharedRows(mixed, down, gate[:, 0]),
    ):
        with pytest.raises(ValueError):
            fold_lanes_with_shared(y, ids, weights, found, fold, bad)


def lane_sums(y, ids, weights, positions, mine, lanes, shared):
    """The lanes of all tokens in torch, from +0 in ascending ids."""
    each = torch.zeros(lanes, *ids.shape[:1], y.shape[1])
    for token, choice in (positions >= 0).nonzero().tolist():
        lane = (int(ids[token, choice]) - mine.start) // (len(mine) // lanes)
        each[lane, token] += weights[token, choice] * y[int(positions[token, choice])].float()
    return each if shared is None else each + shared


def test_what_does_not_fit_is_refused():
    ids, x, w = routes(5, 2, 8), draw(5, 64), draw(8, 32, 64)
    by_token = sorted_tokens.sort_tokens(ids, range(8), HEIGHT, True)
    apart = sorted_tokens.sort_tokens(ids, range(8), HEIGHT)
    for bad in (
        lambda: sorted_tokens.sort_tokens(ids, range(8), 4, True),
        lambda: product_of_groups(x, w, None, apart, PLAIN, 0),
        lambda: product_of_groups(x, w, None, by_token, PLAIN, 0),
        lambda: product_of_groups(x, w, None, apart, PLAIN, 0, shared=True),
        lambda: product_of_groups(x.half(), w, None, by_token, PLAIN, 0, shared=True),
        lambda: product_of_groups(x, w, x, by_token, PLAIN, 0, shared=True),
        lambda: product_of_groups(
            x, w[:, :24].contiguous(), None, by_token, PLAIN, 0, "silu", True
        ),
        lambda: product_of_groups(x, w, None, by_token, Tile(32, 16, 16, 4, 2), 0, shared=True),
        lambda: product_of_groups(
            x, w, None, by_token, Tile(16, 128, 64, 4, 9, "warp_swapped"), 1, shared=True
        ),
    ):
        with pytest.raises(ValueError):
            bad()


@pytest.mark.parametrize(("count", "chosen"), [(60, 4), (16, 16), (512, 10)])
def test_a_choice_is_that_of_a_stable_sort(count, chosen):
    """Ties go to the lower id, NaN comes last, zeros are equal; padding rows choose nobody."""
    logits = draw(6, count, seed=count).mul(4).round().div(4)
    logits[0, ::2], logits[1], logits[2, 1::3] = torch.nan, 0.0, -torch.inf
    logits[3, ::2], logits[3, 1::2], logits[5, 1:] = -0.0, 0.0, torch.nan
    spans = torch.tensor([[0, 1, 9], [1, 4, 0], [0, 0, 0]], dtype=torch.int32)  # five rows
    everyone, routing = range(count), Routing(count, chosen)
    ids, weights, none = route(logits, None, spans, routing, everyone)
    few, _, placed = route(logits[1:5], None, spans.new_tensor([[0, 3, 9]]), routing, everyone)
    one_by_one = route(torch.cat([logits] * 3), None, spans, routing, everyone)
    assert_same_bits(one_by_one.ids[:6], ids)
    assert_same_bits(one_by_one.weights[1:6], weights[1:])
    assert none is None and one_by_one.sorted_tokens is None
    assert_same_bits(few[:3], ids[1:4])
    again = sorted_tokens.sort_tokens(few, everyone, placed.block_rows, True)
    assert torch.equal(placed.positions, again.positions)
    held = int(again.expert_ids[0])
    assert torch.equal(placed.expert_ids[: 1 + held], again.expert_ids[: 1 + held])
    scores = logits[:5].add(0.0).clamp(min=-3e38).nan_to_num(nan=-torch.inf)
    best = scores.neg().sort(dim=1, stable=True).indices[:, :chosen].sort(dim=1).values
    assert torch.equal(ids[:5], best.int())
    assert (ids[5] == -1).all() and not weights[5].any()
    wanted = logits[1:5].double().gather(1, best[1:]).softmax(1)
    assert (weights[1:5] - wanted).abs().max() < 2e-6
    rule = Routing(count, chosen, over_chosen=False, scale=2.0)
    whole = route(logits, None, spans, rule, range(1, 3)).weights
    wanted = 2 * logits[1:5].double().softmax(1).gather(1, best[1:])
    assert (whole[1:5] - wanted).abs().max() < 2e-6


def test_scores_of_a_sigmoid_are_shifted_for_the_choice_alone():
    logits, bias = draw(5, 24, spread=True), draw(24, seed=1)
    spans = torch.tensor([[0, 5, 0]], dtype=torch.int32)
    rule = Routing(24, 6, sigmoid=True, scale=2.5)
    logits[4] = -60.0 - logits[4].abs()
    logits[3] = -100.0
    ids, weights, _ = route(logits, bias, spans, rule, range(24))
    scores = logits.double().sigmoid()
    best = (logits.sigmoid() + bias).topk(6).indices.sort().values
    assert torch.equal(ids, best.int())
    chosen = scores.gather(1, best)
    wanted = 2.5 * chosen / chosen.sum(1, keepdim=True)
    assert ((weights - wanted).abs() < 1e-5 * wanted)[[0, 1, 2, 4]].all()
    assert_same_bits(weights[3], torch.zeros(6))
    assert not torch.equal(route(logits, None, spans, rule, range(24)).ids, ids)


def test_weights_know_what_is_counted_and_no_nan():
    """A chosen score 2^-43 of the largest, which a bias keeps out; NaN, infinities, no mass."""
    spans = torch.tensor([[0, 4, 0]], dtype=torch.int32)
    logits = torch.full((4, 4), -100.0)
    logits[:, 0] = 0.0
    logits[0, 1:3] = torch.tensor([2.0**-43, 2.0**-44]).double().logit().float()
    bias = torch.tensor([-9.0, 5.0, 5.0, -9.0])
    ids, weights, _ = route(logits[:1], bias, spans, Routing(4, 2, sigmoid=True), range(4))
    assert ids.tolist() == [[1, 2]]
    assert (weights - torch.tensor([[2 / 3, 1 / 3]])).abs().max() < 1e-4
    whole = Routing(4, 2, sigmoid=True, over_chosen=False)
    assert not route(logits[:1], bias, spans, whole, range(4)).weights.any()
    logits[1, 1], logits[2], logits[3, 2] = torch.nan, torch.nan, torch.inf
    ids, weights, _ = route(logits, None, spans, Routing(4, 4), range(4))
    assert (ids == torch.arange(4)).all()
    assert_same_bits(weights[1], torch.tensor([1.0, 0.0, 0.0, 0.0]))
    assert_same_bits(weights[2:], torch.zeros(2, 4))


def test_where_experts_live_reaches_no_bit():
    count, chosen, lanes, tokens = 4, 2, 4, 18
    x, ids = draw(tokens, 48, dtype=torch.float16), routes(tokens, chosen, count, padding=2)
    gate_up, down = (draw(count, *at, dtype=torch.float16) for at in ((64, 48), (48, 32)))
    bias, weights = draw(count, 48, dtype=torch.float16, seed=2), draw(tokens, chosen, seed=3)
    for name in order.FOLD_ORDERS:
        totals = []
        for ranks in (1, 2):
            plan, share = order.fold_plan(name, lanes, ranks), count // ranks
            sent = torch.zeros(ranks, plan.slots, tokens, 48)
            for rank, roots in enumerate(plan.roots):
                mine = range(rank * share, (rank + 1) * share)
                part = slice(mine.start, mine.stop)
                held = gate_up[part], down[part], (None, bias[part])
                fold = Lanes(mine, count, lanes // ranks, relative_roots(roots))
                sums = expert_sums(x, ids, weights, *held, fold)
                sent[rank, : len(roots)] = sums.values
            totals.append(fold_final(sent, plan.final))
        assert_same_bits(*totals, f"{name}, whole experts")
        assert totals[0][0].any() and not totals[0][-1].any()
    cut = by_columns(x, ids, weights, gate_up, down, bias, name)
    assert_same_bits(cut, totals[0], "experts cut over outputs")


def test_experts_with_biases_and_clamped_gates_are_chains_with_both():
    """Widths that no tile divides: 48 inputs, 96 and 48 outputs. Gates and ups past 7."""
    tokens, count, lanes = 6, 4, 2
    x, ids = draw(tokens, 48, dtype=torch.float16) * 3, routes(tokens, 2, count, padding=1)
    gate_up, down = (draw(count, n, 48, dtype=torch.float16) for n in (96, 48))
    biases = tuple(draw(count, n, dtype=torch.float16, seed=n) * 4 for n in (96, 48))
    weights, fold = draw(tokens, 2, seed=3), Lanes(range(count), count, lanes, (0, 1))
    asked = x, ids, weights, gate_up, down
    found = expert_sums(*asked, biases, fold, activation="clamped").values
    wanted, largest = torch.zeros(lanes, tokens, 48), 0.0
    for token, choice in (ids >= 0).nonzero().tolist():
        expert, row = int(ids[token, choice]), x[token : token + 1]
        wide = column_gemm(row, gate_up[expert], biases[0][expert], torch.float32)
        largest = max(largest, float(wide.abs().max()))
        y = column_gemm(clamped(wide).half(), down[expert], biases[1][expert], x.dtype)
        wanted[expert // 2, token] += weights[token, choice] * y[0].float()
    assert largest > 7.0
    assert_same_bits(found, wanted)
    others = ((None, biases[1]), "clamped"), ((biases[0], None), "clamped"), (biases, "silu")
    for held, name in others:
        assert not same_bits(expert_sums(*asked, held, fold, activation=name).values, wanted)
    cpu = cpu_expert_sums(x, ids, *asked[2:], biases, fold, activation="clamped").values
    assert (found - cpu).abs().max() <= 2e-3 * cpu.abs().max()


def test_a_tile_that_leaves_the_bit_class_is_named(monkeypatch):
    products = Product("gated", 32, 32), Product("column", 48, 32)
    case = products, None, torch.device("cpu"), torch.float32
    monkeypatch.setattr(expert_tiles, "product_tiles", lambda *_: [(FEW, True), (PLAIN, False)])
    assert not admission.failing_tiles(*case)
    dense = admission.gated_gemm
    monkeypatch.setattr(
        admission, "gated_gemm", lambda *told: dense(*told).nextafter(told[0][:1, :1])
    )
    assert len(admission.failing_tiles(*case)) == 2
    small, large = (
        product_tile(tokens, 4.0, ExpertWeight(80, 48, 2, False), NO_GPU) for tokens in (8, 99)
    )
    assert small[1] and not large[1] and small[0].depth == large[0].depth == 16


def by_columns(x, ids, weights, gate_up, down, bias, name):
    """The total by two ranks that hold 32 and 16 outputs of each product of every expert."""
    count = len(gate_up)
    fold = Lanes(range(count), count, 4, (order.fold_tree(name, 4),))
    parts = [part.contiguous() for part in gate_up.split([48, 16], dim=1)]
    mixed = [expert_rows(x, ids, part, None, range(count), count) for part in parts]
    assert not mixed[0][-1].any()
    found = [
        sums_of_rows(torch.cat(mixed, 2), ids, weights, part.contiguous(), shift.contiguous(), fold)
        for part, shift in zip(
            down.split([32, 16], dim=1), bias.split([32, 16], dim=1), strict=True
        )
    ]
    return torch.cat([sums.values[0] for sums in found], 1)


def emulate(x, w, bias, blocks, block_rows, shared, name, programs=2):
    """Every program of the warp-specialised kernel in turn -> y [P, N], NaN where nothing is."""
    count, n, k = w.shape
    number = EXPERT_ACTIVATIONS[name] if name else 0
    y = torch.full(((blocks.numel() - 1) * block_rows, n // (2 if name else 1)), torch.nan).half()
    arguments = {
        "w_tiles": described(w.view(count * n, k)),
        "x_tiles": described(x),
        "y_tiles": described(y),
        "bias": Pointer(x if bias is None else bias),
        "expert_ids": Pointer(blocks),
        "n": n,
        "steps": k // 16,
        "FORM": warp_swapped.SwappedForm(block_rows, 16, 3, shared, bias is not None, number),
        "DEPENDENT": False,
    }
    kernel, arithmetic = warp_swapped.warp_swapped_chain, (gated, activation)
    for program in range(programs):
        run_program(kernel, arithmetic, program, arguments, programs, (warp_pipeline, chain))
    return y


def clamped(gate_up):
    """fp32 rows, interleaved, as gpt-oss joins them."""
    gate, up = (part.contiguous() for part in gate_and_up(gate_up))
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    power = numpy.exp2(((0.0 - gate * 1.702) * activation.LOG2_E.value).numpy())
    return (up + 1.0) * (gate / (1.0 + torch.from_numpy(power)))


@pytest.mark.parametrize(
    ("block_rows", "n", "shared", "name"),
    [
        (16, 144, True, "silu"),
        (16, 272, False, ""),
        (32, 144, False, "silu"),
        (16, 144, True, "clamped"),
        (128, 272, False, ""),
    ],
)
def test_warp_specialised_rows_have_the_bits_of_one_chain(block_rows, n, shared, name):
    """Blocks of experts 0, 3 and 4; tails in N; a bias; what lies behind the count is not read."""
    blocks = torch.tensor([3, 0, 3, 4, 77, 77], dtype=torch.int32)
    w, bias = draw(5, n, 48, seed=1).half(), draw(5, n, seed=2).half()
    x = draw(block_rows - 3 if shared else 5 * block_rows, 48).half()
    y = emulate(x, w, bias, blocks, block_rows, shared, name)
    for block, expert in enumerate((0, 3, 4)):
        rows = x if shared else x[block * block_rows : (block + 1) * block_rows]
        total = grouped_product(rows, w[expert].T, torch.zeros(len(rows), n)) + bias[expert].float()
        wanted = {"": lambda x: x, "silu": activate_and_multiply, "clamped": clamped}[name](total)
        found = y[block * block_rows : block * block_rows + len(rows)]
        assert_same_bits(found, wanted.half(), f"block {block}")
        other = draw(5, n, seed=3)[expert]
        assert not same_bits((total + other).half(), wanted.half())  # negative control
    assert y[3 * block_rows :].isnan().all()
