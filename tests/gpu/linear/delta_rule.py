"""The gated delta rule in torch, its fp32 operands in one bf16 term, in two, in tf32 or in fp32.

The products of a chunk are k.k, q.k, S'k, S'q, P w and k w'; in fp64 they are the reference. Keys
enter raw: their norm is a factor in fp32.
"""

from functools import partial

import torch

CHUNK, BLOCK, HEAD = 64, 16, 128
MODES = {
    "fp64": (), "fp32": (), "tf32": (),
    "bf16 one term": ("state", "p", "w", "decayed"),
    "bf16 two terms": (),
    "two terms, state one": ("state",),
    "two terms, P and w one": ("p", "w"),
    "two terms, decayed w one": ("decayed",),
    "two terms, keys normalised in bf16": (),
}  # fmt: skip
"""By mode the fp32 operands that have one term."""


def inputs(tokens, heads, regime, device, head=HEAD, seed=0):
    """Raw q, k, v [heads, tokens, D] in bf16 as SiLU leaves them; l (log decays) and b in fp64."""
    generator = torch.Generator(device).manual_seed(seed)
    normal = partial(torch.randn, generator=generator, device=device)
    shared = normal(heads, 1, head) * 0.5  # keys of trained layers are alike
    q, k, v = (
        torch.nn.functional.silu(normal(heads, tokens, head) + shift).bfloat16()
        for shift in (shared, shared, 0.0)
    )
    share = torch.linspace(0.03, 1.0, heads, device=device, dtype=torch.float64)[:, None]
    a = normal(heads, tokens).double()
    if regime == "initial":  # A uniform up to 16, dt_bias 1: most heads forget at once
        decay = -16 * share * torch.nn.functional.softplus(a + 1)
    else:  # as trained layers that remember
        decay = -torch.nn.functional.softplus(a - 9 + 7 * share)
    return q, k, v, decay, torch.sigmoid(normal(heads, tokens).double()).float()


def product(mode, left, right, one_term=(False, False)):
    """left @ right as a mode computes it; bf16 operands have one term as they are."""
    if mode == "fp64":
        return left.double() @ right.double()
    if mode in ("fp32", "tf32"):
        torch.backends.cuda.matmul.allow_tf32 = mode == "tf32"
        total = left.float() @ right.float()
        torch.backends.cuda.matmul.allow_tf32 = False
        return total
    parts = [terms(x, one) for x, one in zip((left, right), one_term, strict=True)]
    pairs = [(x, y) for i, x in enumerate(parts[0]) for j, y in enumerate(parts[1]) if i + j < 2]
    total = pairs[-1][0] @ pairs[-1][1]
    for x, y in pairs[-2::-1]:
        total = total + x @ y
    return total


def terms(x, one):
    """bf16 parts of x, the largest first, in fp32, whose products are exact there."""
    high = x.bfloat16()
    if one or x.dtype == torch.bfloat16:
        return [high.float()]
    return [high.float(), (x - high.float()).bfloat16().float()]


def delta_rule(q, k, v, decay, b, mode):
    """o [heads, tokens, D] of whole chunks, by the products of `mode`; all else in fp32 (fp64)."""
    wide = torch.float64 if mode == "fp64" else torch.float32
    one = MODES[mode]
    heads, tokens, head = k.shape
    n = (1 / (k.double().square().sum(-1) + 1e-6).sqrt()).to(wide)
    m = (1 / (q.double().square().sum(-1) + 1e-6).sqrt() * head**-0.5).to(wide)
    if mode.endswith("normalised in bf16"):
        k, n = (k.float() * n[..., None]).bfloat16(), torch.ones_like(n)
    state = torch.zeros(heads, head, v.shape[2], dtype=wide, device=k.device)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=k.device).tril()
    out = torch.empty(v.shape, dtype=wide, device=k.device)
    of_state = partial(product, mode, one_term=(False, "state" in one))
    of_rows = partial(product, mode, one_term=("p" in one, "w" in one))
    for first in range(0, tokens, CHUNK):
        rows = slice(first, first + CHUNK)
        qc, kc, bc, nc = q[:, rows], k[:, rows], b[:, rows].to(wide), n[:, rows, None]
        log = decay[:, rows].cumsum(1)
        between = (log[:, :, None] - log[:, None, :]).masked_fill(~lower, -torch.inf).exp().to(wide)
        kk, qk = (between * product(mode, x, kc.transpose(1, 2)) for x in (kc, qc))
        begun = log.exp().to(wide)[..., None]
        rest = v[:, rows].to(wide) - nc * (begun * of_state(kc, state))
        updates = torch.zeros_like(rest)
        for first_row in range(0, CHUNK, BLOCK):
            here = slice(first_row, first_row + BLOCK)
            if first_row:
                earlier = of_rows(kk[:, here, :first_row], updates[:, :first_row])
                rest[:, here] -= nc[:, here] * earlier
            weights = nc * kk
            for j in range(first_row, first_row + BLOCK):
                below = slice(j + 1, first_row + BLOCK)
                updates[:, j] = (bc[:, j, None] * nc[:, j]) * rest[:, j]
                rest[:, below] -= weights[:, below, j, None] * updates[:, j, None]
        total = begun * of_state(qc, state) + of_rows(qk, updates)
        out[:, rows] = m[:, rows, None] * total
        left = (log[:, -1:] - log).exp().to(wide)[..., None] * updates
        moved = product(mode, kc.transpose(1, 2), left, (False, "decayed" in one))
        state = log[:, -1].exp().to(wide)[:, None, None] * state + moved
    return out
