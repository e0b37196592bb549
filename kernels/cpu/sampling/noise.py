"""Softmax sums and Gumbel noise of rows of logits; log-probabilities from an integer mass.

For a row of fp32 logits x [V] (after + 0.0):

    m     = max(x)                                          exact in any order
    q_i   = round_half_even(exp(x_i - m) * 2^40)            fp32 subtraction and exp, then int64
    mass  = q_0 + q_1 + ...                                 int64: exact in any order
    log p_i = fp32( (fp64(x_i) - fp64(m)) - log(fp64(mass) * 2^-40) )      fp64 log and subtractions

exp(..) <= 1, so q_i <= 2^40 and a vocabulary of up to 2^22 ids sums below 2^63. Scaling a float by
2^40 is exact. An id whose probability is below about 2^-41 of the largest adds nothing.

Accuracy: the absolute error of log p_i before its rounding to fp32 is below
|d| * 2^-24 + 2^-23 + V * 2^-41, where d <= ln V is the distance from the maximum at which most of
the mass lies: 9e-7 for V = 151,936 and 3e-6 for V = 2^22.

The bits of exp and log do not depend on an element's place in its array, nor on the array's length
or the thread count (tests/kernels/cpu/test_log_probabilities.py tries offsets and lengths); inputs
must be contiguous.

The sample is the Gumbel maximum over the ids that the filters keep:

    w      = Philox word 0 of (seed; id, position, choice, purpose)         [0, 2^32), exact
    v      = (w + 0.5) * 2^-32                                              fp64, exact, in (0, 1)
    noise  = fp32( -log(-log1p(-v)) )                                       fp64 logs, one rounding
    score  = x + noise                                                      fp32
    token  = argmax(score), ties to the lowest id

log1p(-v) is computed as log(1 - v): 1 - v has 33 bits, so it is exact in fp64 and both are the
same number; torch's log1p is a slow scalar loop. The noise lies in [-3.14, 22.88], never infinite.
An id's noise depends on nothing but the request and the id, so only kept ids need it.

Source: Gumbel, 1954; the argmax of logit + Gumbel noise is a sample from the softmax.
"""

import torch

from tpdet.kernels.exact.philox import philox_words
from tpdet.kernels.exact.thresholds import check_vocabulary
from tpdet.kernels.order import MASS_BITS

_BLOCK_ELEMENTS = 1 << 20


def fixed_point_mass(values: torch.Tensor, maximum: torch.Tensor) -> torch.Tensor:
    """round(exp(values - maximum) * 2^40): contiguous fp32 [..., N] -> int64 [..., N].

    `maximum` is finite and broadcasts against `values`, which may be -inf but not NaN or +inf.
    """
    return (torch.exp(values - maximum) * float(1 << MASS_BITS)).round_().to(torch.int64)


def log_mass(logits: torch.Tensor, maximum: torch.Tensor) -> torch.Tensor:
    """log(mass * 2^-40) of each row: fp32 [R, V], maximum fp32 [R] finite -> fp64 [R].

    Raises ValueError when V is over 2^22.
    """
    rows, vocabulary = logits.shape
    check_vocabulary(vocabulary)
    block = max(1, _BLOCK_ELEMENTS // vocabulary)  # bounds the temporaries, not the bits
    mass = torch.empty(rows, dtype=torch.int64)
    for start in range(0, rows, block):
        part = slice(start, start + block)
        mass[part] = fixed_point_mass(logits[part], maximum[part, None]).sum(-1)
    return torch.log(mass.to(torch.float64) * 2.0**-MASS_BITS)


def gumbel_noise(ids: torch.Tensor, *, seed: int, position: int, choice: int) -> torch.Tensor:
    """Noise of vocabulary ids: int64 [N] -> fp32 [N]."""
    words = philox_words(ids, seed=seed, position=position, choice=choice)
    survival = 1.0 - (words.to(torch.float64) + 0.5) * 2.0**-32
    exponential = torch.log(survival).neg_()
    return torch.log(exponential).neg_().to(torch.float32)


def gumbel_max(
    logits: torch.Tensor, ids: torch.Tensor, *, seed: int, position: int, choice: int
) -> int:
    """One token: fp32 logits [N], some finite, of ascending ids int64 [N] -> vocabulary id."""
    noise = gumbel_noise(ids, seed=seed, position=position, choice=choice)
    # torch.argmax promises the first of equal maxima, and `ids` ascend.
    return int(ids[torch.argmax(logits + noise)])
