"""Keys and values in fp8: the scale, the rounding, and what happens at every edge of the rule."""

import pytest
import torch

from tests.lib.bits import assert_same_bits
from tpdet.kernels import order
from tpdet.kernels.exact.fp8_rows import (
    NOT_FINITE,
    decode_rows,
    encode_pairs,
    encode_rows,
    fp8_page_bytes,
    least_exponent,
)
from tpdet.kernels.known import kv_golden
from tpdet.kernels.order import Contract

DTYPES = torch.bfloat16, torch.float16, torch.float32
NUMBERS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
FINITE = torch.arange(256, dtype=torch.uint8)[~NUMBERS.float().isnan()]


def exponent_of(*values, dtype=torch.bfloat16):
    return int(encode_rows(torch.tensor(values).to(dtype))[1]) - 127


def test_every_code_times_every_power_is_exact_and_stored_again_as_it_was():
    wanted = FINITE.view(torch.float8_e4m3fn).double()
    for dtype in DTYPES:
        for exponent in range(least_exponent(dtype), 8):
            byte = torch.tensor(exponent + 127, dtype=torch.uint8)
            numbers = decode_rows(FINITE, byte, dtype)
            assert torch.equal(numbers.double(), wanted * 2.0**exponent), (dtype, exponent)
            codes, again = encode_rows(numbers)
            assert torch.equal(codes, FINITE) and int(again) == exponent + 127


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_rounded_as_torch_rounds_them(dtype):
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(3000, 48, generator=draw) * torch.randn(3000, 1, generator=draw).mul(12).exp()
    x = x.clamp(-6e4, 6e4).to(dtype)
    codes, exponents = encode_rows(x)
    power = torch.exp2(exponents.double() - 127)[:, None]
    scaled = (x.double() / power).clamp(-448, 448)
    assert torch.equal(scaled.float().to(torch.float8_e4m3fn).view(torch.uint8), codes)
    assert exponents.min() <= 127 - 15 and exponents.max() == 127 + 7
    tight = exponents > least_exponent(dtype) + 127
    assert (scaled.abs().amax(1)[tight] > 224).all()


def test_the_exponent_is_the_least_that_holds_the_largest_value():
    assert [exponent_of(x, 0.1) for x in (448.0, 450.0, 449.0)] == [0, 1, 0]
    assert exponent_of(1.75, -0.5) == -8 and exponent_of(-1.7578125, 0.5) == -7
    assert exponent_of(57344.0) == 7 and exponent_of(1e38) == 7
    assert exponent_of(0.0, -0.0) == exponent_of(1e-40) == -124
    assert exponent_of(0.0, 6e-8, dtype=torch.float16) == -15


def test_zeros_keep_their_sign_one_huge_channel_costs_its_row_alone_and_values_saturate():
    x = torch.tensor([[0.0, -0.0, 0.0, -0.0], [60000.0, 1.0, -0.05, 7.0], [0.1, 1.0, -0.05, 7.0]])
    read = decode_rows(*encode_rows(x.bfloat16()), torch.bfloat16).float()
    assert read[0].signbit().tolist() == [False, True, False, True] and not read[0].any()
    assert read[1].tolist() == [57344.0, 1.0, -0.0, 7.0] and read[1, 2].signbit()
    assert (read[2] - x[2]).abs().max() <= 2.0**-4 * 7
    assert decode_rows(*encode_rows(torch.tensor([-3e38, 3e38])), torch.float32).tolist() == [
        -57344.0,
        57344.0,
    ]


@pytest.mark.parametrize("lost", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_shows_in_the_key_of_its_token_and_head(dtype, lost):
    k = torch.randn(4, 2, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    v = k.flip(0).clone()
    plain = encode_pairs(k, v)
    k[1, 0, 5] = v[2, 1, 31] = lost
    (k_codes, k_exponents), (v_codes, v_exponents) = encode_pairs(k, v)
    expected = torch.zeros(4, 2, dtype=torch.bool)
    expected[1, 0] = expected[2, 1] = True
    assert torch.equal(k_exponents == NOT_FINITE, expected) and not k_codes[expected].any()
    assert torch.equal(decode_rows(k_codes, k_exponents, dtype).isnan().all(-1), expected)
    assert not v_codes[2, 1].any() and not decode_rows(v_codes, v_exponents, dtype)[2, 1].any()
    others = ~expected
    for mine, other in zip((k_codes, k_exponents), plain[0], strict=True):
        assert_same_bits(mine[others], other[others])
    others[1, 0] = True  # a key alone leaves its value
    for mine, other in zip((v_codes, v_exponents), plain[1], strict=True):
        assert_same_bits(mine[others], other[others])


def test_the_golden_vectors_have_their_digest_which_the_id_names(monkeypatch):
    assert kv_golden.kv_golden_digest() == order.KV_GOLDEN_SHA256
    known = Contract("cpu", "bfloat16", 8, "tree")
    fp8 = Contract("cpu", "bfloat16", 8, "tree", kv_cache_dtype="fp8")
    assert Contract("cpu", "bfloat16", 8, "tree", kv_cache_dtype="auto").identifier == (
        known.identifier
    )
    monkeypatch.setattr(order, "KV_GOLDEN_SHA256", "0")
    assert len({known.identifier, fp8.identifier}) == 2
    real = kv_golden.encode_pairs

    def cut_off(k, v):
        (k_codes, k_exponents), value = real(k, v)
        return (k_codes.sub(k_codes % 2), k_exponents), value

    monkeypatch.setattr(kv_golden, "encode_pairs", cut_off)
    assert kv_golden.kv_golden_digest() != order.KV_GOLDEN_SHA256


def test_a_page_holds_nearly_twice_the_tokens():
    assert 256 * 128 * 2 / fp8_page_bytes(128) > 1.98 and 256 * 64 * 2 / fp8_page_bytes(64) > 1.95
