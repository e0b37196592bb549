"""Philox4x32-10, the counter-based random generator, in integers only.

Source: Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC'11, and the
Random123 distribution (known answers: its tests/kat_vectors, repeated in
tests/kernels/cpu/test_philox.py).

One block takes a counter of four 32-bit words and a key of two and gives four words:

    repeat 10 times:   hi0, lo0 = M0 * c0        hi1, lo1 = M1 * c2        (32 x 32 -> 64 bits)
                       c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
                       k0, k1 = k0 + W0, k1 + W1                           (mod 2^32)

tpdet's use of it (contract): key = (low, high) word of the request's 64-bit seed; counter =
(vocabulary id, position of the sampled token, choice index, purpose); word 0 of the output. A word
is thus a pure function of the request and the id: never of batch slot, rank or call count.
"""

import torch

PURPOSE_TOKEN = 0

_WORD = 0xFFFFFFFF
MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
ROUNDS = 10


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """One block in plain Python integers: the reference the tensor form is tested against."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = MULTIPLIER_0 * c0, MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (second >> 32) ^ c1 ^ k0,
            second & _WORD,
            (first >> 32) ^ c3 ^ k1,
            first & _WORD,
        )
        k0, k1 = (k0 + WEYL_0) & _WORD, (k1 + WEYL_1) & _WORD
    return c0, c1, c2, c3


def philox_words(
    ids: torch.Tensor, *, seed: int, position: int, choice: int, purpose: int = PURPOSE_TOKEN
) -> torch.Tensor:
    """Output word 0 for every vocabulary id: int64 [N] -> int64 [N] in [0, 2^32), any device.

    `seed` is in [0, 2^64), the other counter words in [0, 2^32). Raises ValueError outside.
    """
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed {seed} does not fit 64 bits")
    for name, word in (("position", position), ("choice", choice), ("purpose", purpose)):
        if not 0 <= word <= _WORD:
            raise ValueError(f"{name} {word} does not fit the 32 bits of a counter word")
    k0, k1 = seed & _WORD, seed >> 32
    c0, c1 = ids.clone(), torch.full_like(ids, position)
    c2, c3 = torch.full_like(ids, choice), torch.full_like(ids, purpose)
    # Seven arrays, all work in place: at 151,936 ids fresh ones cost more than the arithmetic.
    product0, product1, scratch = (torch.empty_like(ids) for _ in range(3))
    for _ in range(ROUNDS):
        high0 = _multiply(c0, MULTIPLIER_0, product0, scratch)
        high1 = _multiply(c2, MULTIPLIER_1, product1, scratch)
        high0.bitwise_xor_(c3).bitwise_xor_(k1)
        high1.bitwise_xor_(c1).bitwise_xor_(k0)
        c0, c1, c2, c3, product0, product1 = high1, product1, high0, product0, c1, c3
        k0, k1 = (k0 + WEYL_0) & _WORD, (k1 + WEYL_1) & _WORD
    return c0


def _multiply(
    x: torch.Tensor, multiplier: int, product: torch.Tensor, scratch: torch.Tensor
) -> torch.Tensor:
    """The high word of x * multiplier, in place of x; `product` gets the low word.

    Both multipliers exceed 2^31, so x * (multiplier - 2^32) fits a signed 64-bit integer where
    x * multiplier would not; the 2^32 * x that is missing is added back to the high word.
    """
    torch.mul(x, multiplier - (1 << 32), out=product)
    torch.bitwise_right_shift(product, 32, out=scratch)
    product.bitwise_and_(_WORD)
    return x.add_(scratch).bitwise_and_(_WORD)
