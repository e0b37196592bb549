"""Logits to sample from, and slow exact ways to order and to cut them."""

from fractions import Fraction

import torch

from tpdet.kernels.cpu.sampling.noise import fixed_point_mass

VOCABULARIES = (1_000, 32_003, 151_936)
SHARES = (1e-12, 0.1, 0.5, 0.9, 0.999, 1.0 - 1e-7)


def logits_with_ties(vocabulary: int, seed: int, levels: int = 40) -> torch.Tensor:
    """Few distinct values, so that every cut falls among equal ones; both zeros and -inf occur."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-levels, 12, (vocabulary,), generator=generator) / 4.0
    x[::7] = -0.0
    x[3::501] = -torch.inf
    return x


def logits_smooth(vocabulary: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    """Normal draws: no ties."""
    return torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def total_order(x: torch.Tensor) -> list[int]:
    """Ids by logit, largest first, and by id where equal."""
    values = x.tolist()
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


def exact_top_p(x: torch.Tensor, numerator: int) -> list[int]:
    """The ids that top-p keeps, in exact arithmetic; ascending."""
    mass = fixed_point_mass(x, x.amax()).tolist()
    goal, reached, kept = Fraction(numerator * sum(mass), 2**30), 0, []
    for index in total_order(x):
        kept.append(index)
        reached += mass[index]
        if reached >= goal:
            break
    return sorted(kept)


def ids_of(mask: torch.Tensor) -> list[int]:
    """The ids that a mask keeps, ascending."""
    return mask.nonzero().view(-1).tolist()
