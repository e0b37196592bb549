"""The sample: Gumbel-max over the ids that the filters keep.

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
