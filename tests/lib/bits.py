"""Bits are compared as bytes; the first difference is located and both values are shown."""

import torch


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors have one shape, one dtype and the same bytes (-0.0 differs from 0.0)."""
    return left.shape == right.shape and left.dtype == right.dtype and _bytes_equal(left, right)


def assert_same_bits(left: torch.Tensor, right: torch.Tensor, what: str = "tensors") -> None:
    """Raise AssertionError naming the first differing index and both values."""
    if left.shape != right.shape or left.dtype != right.dtype:
        raise AssertionError(
            f"{what}: {tuple(left.shape)} {left.dtype} against {tuple(right.shape)} {right.dtype}"
        )
    if _bytes_equal(left, right):
        return
    a, b = _as_bytes(left), _as_bytes(right)
    size = left.element_size()
    flat = int((a != b).nonzero()[0]) // size
    count = int((a.view(-1, size) != b.view(-1, size)).any(1).sum())
    index = []
    rest = flat
    for extent in reversed(left.shape):
        index.append(rest % extent)
        rest //= extent
    values = left.reshape(-1)[flat].item(), right.reshape(-1)[flat].item()
    raise AssertionError(
        f"{what}: {count} of {left.numel()} elements differ, first at {tuple(reversed(index))}: "
        f"{values[0]!r} against {values[1]!r}"
    )


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _bytes_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(_as_bytes(left), _as_bytes(right))
