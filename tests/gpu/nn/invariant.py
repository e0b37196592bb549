"""`tpdet.nn.invariant()` on a GPU: rows and models alone and in batches, gradients, fp64, scope."""

import torch
from torch.nn import functional as F

from tests.gpu.lib.checks import Differences, draw, same
from tests.gpu.lib.suite import Check
from tests.nn.small_models import FAMILIES, padded, sequences, small_model
from tpdet.nn import invariant

ROWS, WIDTH = 77, 208
GRADIENTS = 2 * WIDTH  # values of the widest result
TYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_ERROR = 1e-5


def operators(dtype):
    """Operators of rows [M, 208] by name, their weights drawn outside of the mode."""
    weight, bias = draw(300, WIDTH, dtype=dtype, seed=3), draw(300, dtype=dtype, seed=4)
    factor, matrices = draw(WIDTH, dtype=dtype, seed=5), draw(2, WIDTH, 48, dtype=dtype, seed=6)
    other = draw(WIDTH, 40, dtype=dtype, seed=7)
    ends = lambda x: torch.tensor([len(x) // 2, len(x)], dtype=torch.int32, device="cuda")
    return {
        "linear": lambda x: F.linear(x, weight, bias),
        "matmul": lambda x: x @ other,
        "odd terms": lambda x: x[:, :35] @ other[:35],
        "batched": lambda x: x.view(len(x), 2, -1) @ x.view(len(x), 2, -1).mT,
        "softmax": lambda x: x.softmax(-1),
        "log_softmax": lambda x: x.log_softmax(-1),
        "logsumexp": lambda x: x.logsumexp(-1),
        "sum": lambda x: x.sum(-1),
        "mean": lambda x: x.pow(2).mean(-1, keepdim=True),
        "layer_norm": lambda x: F.layer_norm(x, (WIDTH,), factor, factor),
        "rms_norm": lambda x: F.rms_norm(x, (WIDTH,), factor, 1e-6),
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "rotation": lambda x: torch.cat([x.cos(), x.sin()], -1),
        "topk": lambda x: (x * 2).round().topk(9, -1).values,
        "loss": lambda x: F.cross_entropy(x, torch.full_like(x[:, 0], 3).long(), reduction="none"),
        "experts": lambda x: torch._grouped_mm(x, matrices, offs=ends(x)),
    }


def computed(function, x, grad):
    """The results of a function and the gradient of x."""
    leaf = x.clone().requires_grad_()
    y = function(leaf)
    y.backward(grad[:, : y[0].numel()].reshape(y.shape).to(y.dtype))
    return y.detach(), leaf.grad


def rows_have_one_result(dtype):
    """Each operator, forward and backward: some rows alone and all together; none is refused."""
    differences = Differences()
    x, grad = draw(ROWS, WIDTH, dtype=dtype), draw(ROWS, GRADIENTS, dtype=dtype, seed=1)
    for name, function in operators(dtype).items():
        if name == "experts":
            continue  # its halves are not those of a part
        with invariant():
            whole = computed(function, x, grad)
            for first, end in ((0, 1), (5, 7), (20, ROWS)):
                part = computed(function, x[first:end], grad[first:end])
                for few, many in zip(part, whole, strict=True):
                    differences.keep(same, few, many[first:end], f"{name} {first} {end}")
    return differences.finish()


def values_are_those_of_float64():
    """Results and gradients of fp32 against PyTorch's own in fp64."""
    differences = Differences()
    x, grad = (
        draw(ROWS, WIDTH, dtype=torch.float32),
        draw(ROWS, GRADIENTS, dtype=torch.float32, seed=1),
    )
    own, wide = operators(torch.float32), operators(torch.float64)
    for name in sorted({*own} - {"topk", "experts"}):
        with invariant():
            inside = computed(own[name], x, grad)
        outside = computed(wide[name], x.double(), grad.double())
        for found, reference in zip(inside, outside, strict=True):
            differences.keep(close, found, reference, name)
    return differences.finish()


def close(found, reference, name):
    """Raise where the largest difference is over MOST_ERROR of the largest value."""
    error = float((found.double() - reference).abs().max() / reference.abs().max())
    assert error < MOST_ERROR, f"{name}: {error}"


def experts_are_products_of_their_groups(dtype):
    """`_grouped_mm` and its gradients: each group has the bits of a product of its own."""
    x, grad = draw(ROWS, WIDTH, dtype=dtype), draw(ROWS, GRADIENTS, dtype=dtype, seed=1)
    half = ROWS // 2
    matrices, experts = draw(2, WIDTH, 48, dtype=dtype, seed=6), operators(dtype)["experts"]
    with invariant():
        whole = computed(experts, x, grad)
        for index, span in enumerate((slice(0, half), slice(half, ROWS))):
            part = computed(lambda x, m=matrices[index]: x @ m, x[span], grad[span])
            for few, many in zip(part, whole, strict=True):
                same(few, many[span], f"group {index}")


def attention_is_that_of_each_sequence(dtype):
    """Padded batches, windows, groups of heads, gradients; keys beyond a page."""
    lengths, width, differences = (300, 3, 129), 310, Differences()
    q, grad = (draw(3, 4, width, 64, dtype=dtype, seed=seed) for seed in (0, 3))
    k, v = (draw(3, 2, width, 64, dtype=dtype, seed=seed) for seed in (1, 2))
    row, key = torch.arange(width, device="cuda")[:, None], torch.arange(width, device="cuda")
    for side, window in ((s, w) for s in ("left", "right") for w in (width, 40)):
        starts = [width - n if side == "left" else 0 for n in lengths]
        sees = (key <= row) & (key > row - window)
        spans = [(key >= s) & (key < s + n) for s, n in zip(starts, lengths, strict=True)]
        mask = torch.stack([sees & span for span in spans])[:, None]
        real = torch.stack(spans)[:, None, :, None]
        with invariant():
            together = attended(q, k, v, torch.where(real, grad, 0.0), mask)
            for i, (start, n) in enumerate(zip(starts, lengths, strict=True)):
                cut = slice(start, start + n)
                one = (x[i : i + 1, :, cut] for x in (q, k, v, grad))
                alone = attended(*one, sees[:n, :n])
                for few, many in zip(alone, together, strict=True):
                    differences.keep(same, few, many[i : i + 1, :, cut], f"{side} {window} {i}")
    return differences.finish()


def attended(q, k, v, grad, mask):
    """The result of attention and the gradients of its three inputs."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    y = F.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
    y.backward(grad)
    return y.detach(), *(leaf.grad for leaf in leaves)


def a_model_has_the_same_bits_in_every_batch(family, dtype):
    """Logits of real tokens and gradients by them: alone, in 16, padded left and right."""
    model = small_model(family).to("cuda", dtype)
    rows = sequences([12, 12, 5, 40, *range(3, 15)])
    differences, changed = Differences(), 0
    stock = [outputs(model, [row], "right")[0] for row in rows]
    for side in ("left", "right"):
        stock_pairs = zip(stock, outputs(model, rows, side), strict=True)
        changed += sum(not torch.equal(a[0], b[0]) for a, b in stock_pairs)
        with invariant():
            alone = [outputs(model, [row], "right")[0] for row in rows]
            for index, pair in enumerate(zip(alone, outputs(model, rows, side), strict=True)):
                for few, many in zip(*pair, strict=True):
                    differences.keep(same, few, many, f"{side} {index}")
    # Halves are rounded so coarsely that this shape may hide what the stock model does.
    assert changed or dtype != torch.float32, "the stock model has the same bits too"
    return differences.finish()


def outputs(model, rows, side):
    """By sequence: logits and gradients of embedded tokens, of its real tokens."""
    ids, mask = (x.cuda() for x in padded(rows, side))
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    y = model(inputs_embeds=embedded, attention_mask=mask, position_ids=positions).logits
    scores = torch.log_softmax(y[:, :-1].float(), -1).gather(-1, ids[:, 1:, None])[..., 0]
    counted = mask[:, 1:].bool() & mask[:, :-1].bool()
    torch.where(counted, -scores, 0.0).sum().backward()
    model.zero_grad()
    keep = mask.bool()
    return [(y[i][keep[i]].detach(), embedded.grad[i][keep[i]]) for i in range(len(rows))]


def invariant_checks():
    """Every check of the mode."""
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in TYPES}
    return [
        Check("values", values_are_those_of_float64),
        *(Check(f"rows {name}", rows_have_one_result, (dtype,)) for dtype, name in names.items()),
        *(
            Check(f"{what} {name}", function, (dtype,))
            for dtype, name in names.items()
            for what, function in (
                ("experts", experts_are_products_of_their_groups),
                ("attention", attention_is_that_of_each_sequence),
            )
        ),
        *(
            Check(f"{family} {name}", a_model_has_the_same_bits_in_every_batch, (family, dtype))
            for family in FAMILIES
            for dtype, name in names.items()
        ),
    ]
