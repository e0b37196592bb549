"""Operators inside `tpdet.nn.invariant()`: a row has one result and one gradient in any batch."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.lib.bits import assert_same_bits, same_bits
from tpdet.nn import invariant

ROWS = 37  # no multiple of a vector, a block of rows or a tile
WIDTH = 70


def draw(*shape, seed=0, dtype=torch.float32):
    """Normal values, not drawn by torch: inside, nothing random is admitted."""
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return torch.from_numpy(values).to(dtype)


def experts(x):
    """Rows by a choice of expert, as transformers sorts and multiplies them."""
    choice = (x[:, 0] > 0).long()
    order = torch.argsort(choice, stable=True)
    ends = torch.histc(choice.float(), 2, 0, 1).cumsum(0).int()
    y = torch._grouped_mm(x[order], draw(2, x.shape[1], 24, seed=5, dtype=x.dtype), offs=ends)
    return torch.zeros_like(y).index_put((order,), y)


def weights(x, *shape):
    return draw(*shape, seed=9, dtype=x.dtype)


BY_ROW = {
    "linear": lambda x: F.linear(x, weights(x, 300, WIDTH), weights(x, 300)),
    "matmul": lambda x: x @ weights(x, WIDTH, 5),
    "matmul of each": lambda x: x[:, None] @ weights(x, WIDTH, WIDTH),
    "batched": lambda x: x.view(len(x), 2, -1) @ x.view(len(x), 2, -1).mT,
    "mv": lambda x: x @ weights(x, WIDTH),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.pow(2).mean(-1, keepdim=True),
    "cumsum": lambda x: x.cumsum(-1),
    "layer_norm": lambda x: F.layer_norm(x, (WIDTH,), weights(x, WIDTH), weights(x, WIDTH)),
    "rms_norm": lambda x: F.rms_norm(x, (WIDTH,), weights(x, WIDTH), 1e-6),
    "rsqrt": lambda x: (x * x + 1).rsqrt(),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
    "exp": torch.exp,
    "power": lambda x: (x * x + 1) ** 0.3,
    "rotation": lambda x: torch.cat([x.cos(), x.sin()], -1),
    "topk": lambda x: (x * 2).round().topk(9, -1).values,
    "experts": experts,
    "picked": lambda x: x.index_select(1, torch.tensor([3, 3, 0])),
    "gathered": lambda x: x.gather(1, torch.tensor([[4, 4, 1]]).expand(len(x), 3)),
    "loss": lambda x: F.cross_entropy(x, torch.full((len(x),), 3), reduction="none"),
}


def computed(function, x, grad):
    """The results of `function` and the gradient of x; grad [rows, ..] is cut to the results'."""
    leaf = x.clone().requires_grad_()
    y = function(leaf)
    y.backward(grad[:, : y[0].numel()].reshape(y.shape).to(y.dtype))
    return y.detach(), leaf.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", BY_ROW)
def test_a_row_has_the_same_result_and_gradient_in_any_batch(name, dtype):
    function = BY_ROW[name]
    x, grad = draw(ROWS, WIDTH, dtype=dtype), draw(ROWS, 400, seed=1)
    with invariant():
        whole = computed(function, x, grad)
        for first, end in ((0, 1), (5, 7), (20, ROWS)):
            part = computed(function, x[first:end], grad[first:end])
            for few, many in zip(part, whole, strict=True):
                assert_same_bits(few, many[first:end], f"rows {first} to {end}")
        order = torch.arange(ROWS).flip(0)
        for few, many in zip(computed(function, x[order], grad[order]), whole, strict=True):
            assert_same_bits(few, many[order], "in another order")


TRAPS = ["linear", "matmul", "mean", "silu", "sigmoid", "gelu_tanh", "softplus", "softmax"]


def test_stock_operators_do_depend_on_the_batch_here():
    """The control: where it fails, the shapes above show nothing on this processor."""
    x, grad = draw(ROWS, WIDTH), draw(ROWS, 400, seed=1)
    differ = set()
    for name in TRAPS:
        whole = computed(BY_ROW[name], x, grad)
        for row in range(ROWS):
            part = computed(BY_ROW[name], x[row : row + 1], grad[row : row + 1])
            if not all(same_bits(a, b[row : row + 1]) for a, b in zip(part, whole, strict=True)):
                differ.add(name)
    assert len(differ) >= 4, differ


def test_sums_over_a_batch_know_no_order():
    """Losses, gradients of parameters that are sums, and additions at indices."""
    x, index = draw(ROWS, WIDTH), torch.arange(ROWS) % 5
    target = torch.arange(ROWS) % WIDTH
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(2))
    base, table = draw(6, WIDTH, seed=3), draw(6, WIDTH, seed=4)

    def norm_gradient(rows):
        weight = torch.ones(WIDTH, requires_grad=True)
        F.layer_norm(rows, (WIDTH,), weight).pow(2).sum().backward()
        return weight.grad

    def embedding_gradient(ids, rows):
        leaf = table.clone().requires_grad_()
        F.embedding(ids, leaf).backward(rows)
        return leaf.grad

    sums = {
        "index_add": lambda i: base.index_add(0, index[i], x[i]),
        "index_add_": lambda i: base.clone().index_add_(0, index[i], x[i], alpha=2),
        "index_put": lambda i: base.index_put((index[i],), x[i], accumulate=True),
        "index_put 2": lambda i: base.index_put((index[i], target[i]), x[i, 0], accumulate=True),
        "scatter_add": lambda i: base.scatter_add(0, index[i, None].expand(-1, WIDTH), x[i]),
        "loss": lambda i: F.cross_entropy(x[i], target[i]),
        "sum": lambda i: x[i].sum(0),
        "norm": lambda i: norm_gradient(x[i]),
        "embedding": lambda i: embedding_gradient(index[i], x[i]),
    }
    with invariant():
        for name, run in sums.items():
            assert_same_bits(run(torch.arange(ROWS)), run(order), name)
    changed = [name for name, run in sums.items() if not same_bits(run(order), run(order.flip(0)))]
    assert len(changed) > 4, changed


def attended(q, k, v, grad, **named):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    y = F.scaled_dot_product_attention(*leaves, enable_gqa=True, **named)
    y.backward(grad)
    return y.detach(), *(leaf.grad for leaf in leaves)


def visible(length, width, start, window=None):
    """The causal mask [T, T] of `length` tokens at columns from `start` on."""
    row, key = torch.arange(width)[:, None], torch.arange(width)
    mask = (key <= row) & (key >= start) & (key < start + length)
    return mask if window is None else mask & (key > row - window)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_has_the_bits_of_each_sequence_alone(dtype, window):
    lengths, width = (70, 3, 41), 83
    q, grad = (draw(3, 4, width, 16, seed=seed, dtype=dtype) for seed in (0, 3))
    k, v = (draw(3, 2, width, 16, seed=seed, dtype=dtype) for seed in (1, 2))
    for side in ("left", "right"):
        starts = [width - length if side == "left" else 0 for length in lengths]
        real = [slice(start, start + n) for start, n in zip(starts, lengths, strict=True)]
        padded_grad = torch.zeros_like(grad)
        for index, span in enumerate(real):
            padded_grad[index, :, span] = grad[index, :, span]
        rows = zip(lengths, starts, strict=True)
        mask = torch.stack([visible(n, width, start, window) for n, start in rows])[:, None]
        float_mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
        with invariant():
            together = attended(q, k, v, padded_grad, attn_mask=mask)
            by_numbers = attended(q, k, v, padded_grad, attn_mask=float_mask)
            assert all(map(same_bits, together, by_numbers))
            for index, span in enumerate(real):
                one = [x[index : index + 1, :, span] for x in (q, k, v, grad)]
                named = {"is_causal": True}
                if window is not None:
                    named = {"attn_mask": visible(lengths[index], lengths[index], 0, window)}
                for few, many in zip(attended(*one, **named), together, strict=True):
                    assert_same_bits(few, many[index : index + 1, :, span], f"{side} {index}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_of_heads_have_the_gradients_of_keys_that_are_repeated_for_them(dtype):
    q, grad = (draw(2, 6, 21, 16, seed=seed, dtype=dtype) for seed in (0, 3))
    k, v = (draw(2, 2, 21, 16, seed=seed, dtype=dtype) for seed in (1, 2))

    def repeated(q, k, v):
        many = [x[:, :, None].expand(2, 2, 3, 21, 16).reshape(2, 6, 21, 16) for x in (k, v)]
        return F.scaled_dot_product_attention(q, *many, is_causal=True)

    with invariant():
        grouped = attended(q, k, v, grad, is_causal=True)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        y = repeated(*leaves)
        y.backward(grad)
    assert all(map(same_bits, grouped, (y.detach(), *(leaf.grad for leaf in leaves))))


def test_rows_without_keys_are_zeros_and_level_rows_have_the_bits_of_single_ones():
    q, k, v = (draw(2, 2, 9, 16, seed=seed) for seed in range(3))
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool)
    mask[0, :, 4] = False
    with invariant():
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        single = [F.scaled_dot_product_attention(q[:, :, i : i + 1], k, v) for i in range(9)]
    assert not y[0, :, 4].any() and y[1, :, 4].all()
    for row in (0, 3, 5, 8):
        assert_same_bits(y[:, :, row : row + 1], single[row])


@pytest.mark.slow  # it compiles
def test_the_custom_operators_keep_the_rules_of_torch_library():
    q, k, v = (draw(1, 2, 5, 16, seed=seed).requires_grad_() for seed in range(3))
    runs = [0, 0, 5, 0, 1, 0, 0]
    plain = [x.detach() for x in (q, q, k, v, q)]
    torch.library.opcheck(torch.ops.tpdet_invariant.attention.default, (q, k, v, runs))
    torch.library.opcheck(torch.ops.tpdet_invariant.attention_backward.default, (*plain, runs))
