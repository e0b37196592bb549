"""Models of transformers inside `tpdet.nn.invariant()`: one digest in every batch; not so stock."""

from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.lib.bits import same_bits
from tests.nn.small_models import FAMILIES, digest, logits_of, padded, sequences, small_model
from tpdet.nn import invariant
from tpdet.nn.invariant_mode.admitted import ADMITTED
from tpdet.nn.invariant_mode.mode import overload

pytest.importorskip("transformers")

WATCHED = 4
ROWS = sequences([12] * WATCHED + [3 + 5 * i % 17 for i in range(60)])
SHUFFLED = sorted(range(len(ROWS)), key=lambda i: i * 37 % 64)
CIRCUMSTANCES = [
    (1, "right", 0), (4, "right", 0), (4, "left", 5), (16, "left", 0), (16, "right", 3),
    (64, "left", 0), (64, "right", 0),
]  # fmt: skip
"""Sequences of a batch, the side of its padding and columns of it beyond the longest sequence."""


def digests(model, circumstances):
    """The digest of the first rows' logits by circumstance, and in another order."""
    seen = {}
    for size, side, more in circumstances:
        groups = [ROWS[first : first + size] for first in range(0, WATCHED, size)]
        logits = [y for group in groups for y in logits_of(model, group, side, more)]
        seen[size, side, more] = digest(logits[:WATCHED])
    order = [i for i in SHUFFLED if i < circumstances[-1][0]]
    logits = logits_of(model, [ROWS[i] for i in order], "left")
    seen["shuffled"] = digest(logits[order.index(i)] for i in range(WATCHED))
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_has_one_digest_in_every_batch_and_the_stock_one_has_not(family):
    model = small_model(family)
    with invariant():
        inside = digests(model, CIRCUMSTANCES)
    assert len({*inside.values()}) == 1, inside
    assert len({*digests(model, CIRCUMSTANCES).values()}) > 1, "no difference: take another shape"


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", torch.bfloat16), ("gpt2", torch.float16), ("qwen3_moe", torch.bfloat16)],
)
def test_half_precision_has_one_digest_too(family, dtype):
    model = small_model(family).to(dtype)
    few = [CIRCUMSTANCES[0], *CIRCUMSTANCES[2:5]]
    with invariant():
        inside = digests(model, few)
    assert len({*inside.values()}) == 1, inside
    assert len({*digests(model, few).values()}) > 1


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_sequence_of_a_long_batch_has_its_own_bits(family, attention):
    """Lengths beyond a page of 256 keys; eager attention in batches of one length."""
    model = small_model(family, attention)
    lengths = (700, 300, 257, 256, 64, 65, 1, 2)
    rows = sequences(lengths if attention == "sdpa" else [300] * 6)
    with invariant():
        alone = [logits_of(model, [row])[0] for row in rows]
        for side in ("left", "right"):
            for left, right in zip(alone, logits_of(model, rows, side), strict=True):
                assert same_bits(left, right)


def gradients(model, rows, side):
    """The gradient of a loss by each sequence's embedded tokens, and by all parameters."""
    ids, mask = padded(rows, side)
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    model.zero_grad()
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    y = model(inputs_embeds=embedded, attention_mask=mask, position_ids=position_ids).logits
    scores = torch.log_softmax(y[:, :-1].float(), -1).gather(-1, ids[:, 1:, None])[..., 0]
    counted = mask[:, 1:].bool() & mask[:, :-1].bool()
    torch.where(counted, -scores, 0.0).sum().backward()
    by_token = [x[keep.bool()] for x, keep in zip(embedded.grad, mask, strict=True)]
    return by_token, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_a_sequence_are_those_it_has_alone(family, dtype):
    model, rows = small_model(family).to(dtype), sequences([9, 5, 14])
    with invariant():
        alone = [gradients(model, [row], "right")[0][0] for row in rows]
        for side in ("left", "right"):
            batched, weights = gradients(model, rows, side)
            assert all(map(same_bits, alone, batched))
        again = gradients(model, rows, "right")[1]
    assert len(weights) > 10 and all(map(same_bits, weights, again))
    if dtype == torch.float32:  # in bf16 some machines' stock arithmetic happens to agree
        stock = [gradients(model, [row], "right")[0][0] for row in rows]
        assert not all(map(same_bits, stock, gradients(model, rows, "left")[0]))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_greedy_generation_is_the_same_alone_and_padded(context):
    model, rows = small_model("qwen3_moe"), sequences([9, 2, 5])
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    settings |= {"return_dict_in_generate": True, "eos_token_id": None}
    ids, mask = padded(rows, "left")
    with invariant(), context():
        together = model.generate(ids, attention_mask=mask, **settings).logits
        for index, row in enumerate(rows):
            alone = model.generate(row[None], attention_mask=torch.ones_like(row[None]), **settings)
            assert all(
                same_bits(a[0], b[index]) for a, b in zip(alone.logits, together, strict=True)
            )


class Seen(TorchDispatchMode):
    """Notes the names of the operators that reach the dispatcher below autograd."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func).removeprefix("aten.").removesuffix(".default"))
        return func(*args, **kwargs or {})


def test_the_lists_name_what_the_models_really_call():
    names = set()
    for family in FAMILIES:
        model, rows = small_model(family), sequences([4, 3])
        with invariant(), Seen() as seen:
            gradients(model, rows, "left")
        names |= seen.names
    lists = [ADMITTED.copies, ADMITTED.exact, ADMITTED.order_free, ADMITTED.whole_numbers]
    lists += [ADMITTED.elementwise, ADMITTED.replaced]
    known = [name for names_of_one in lists for name in names_of_one]
    assert len(known) == len({*known}) and all(map(overload, known))
    own = {"tpdet_invariant.attention", "tpdet_invariant.attention_backward"}
    assert names - {*known} == own
    assert {"mm", "addmm", "_grouped_mm", "native_layer_norm", "tanh", "silu", "sort"} < names
    assert not {"linear", "matmul", "cross_entropy_loss", "scaled_dot_product_attention"} & names


def test_dropout_is_refused_by_name_and_evaluation_mode_is_the_remedy():
    model = small_model("gpt2")
    with invariant():
        logits_of(model, ROWS[:1])
        with pytest.raises(ValueError, match=r"(dropout 0.1|bernoulli_).*eval"):
            logits_of(model.train(), ROWS[:1])


@pytest.mark.parametrize("inside", [nullcontext, invariant])
def test_a_model_comes_close_to_itself(inside):
    """The mode changes roundings, not the function."""
    model = small_model("llama")
    stock = logits_of(model, ROWS[:2])
    with inside():
        found = logits_of(model, ROWS[:2])
    difference = max(float((a - b).abs().max()) for a, b in zip(stock, found, strict=True))
    assert difference < 1e-5
    assert (difference == 0) == (inside is nullcontext)
