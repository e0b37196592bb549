"""Digests by the GPU's kernels are those of the library."""

import blake3
import pytest
import torch

from tpdet.kernels.cuda.digests.blake3 import blake3_of

pytestmark = pytest.mark.interpreted

SIZES = (0, 1, 63, 64, 65, 1000, 1023, 1024, 1025, 2048, 2049, 3072, 5127, 8192, 9217)


def message(size, seed):
    return torch.randint(
        0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


@pytest.mark.parametrize("header", [b"", b"torch.bfloat16 [7, 3] 0:7\n"])
def test_messages_of_every_length_side_by_side_have_the_librarys_digests(header):
    parts = [message(size, i) for i, size in enumerate(SIZES)]
    expected = [blake3.blake3(header).update(part.numpy().tobytes()).digest() for part in parts]
    assert blake3_of([header] * len(parts), parts) == expected
    assert blake3_of([header], parts[4:5]) == expected[4:5]
    assert blake3_of([], []) == []


def test_messages_in_several_windows_have_the_librarys_digests(monkeypatch):
    monkeypatch.setattr("tpdet.kernels.cuda.digests.blake3.WINDOW_BYTES", 3 * 1024)
    header, parts = bytes(range(250)) * 5, [message(size, size) for size in (0, 1025, 5127)]
    expected = [blake3.blake3(header).update(part.numpy().tobytes()).digest() for part in parts]
    assert blake3_of([header] * 3, parts) == expected


def test_a_slice_is_digested_row_by_row():
    whole = torch.randn(4, 300, generator=torch.Generator().manual_seed(2)).bfloat16()
    part = whole[:, 17:290]
    raw = part.contiguous().view(torch.uint8).numpy().tobytes()
    assert blake3_of([b"x"], [part]) == [blake3.blake3(b"x" + raw).digest()]
    other = whole.clone()
    other[3, 289] += 1
    assert blake3_of([b"x"], [other[:, 17:290]]) != blake3_of([b"x"], [part])
