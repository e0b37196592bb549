"""Slots of linear-attention states: their bytes, clearing, snapshots, a refusal without memory."""

import pytest
import torch

from tpdet.cache import states as module
from tpdet.cache.states import StateShape, allocate_states
from tpdet.errors import ResourceError

SHAPE = StateShape(layers=2, key_heads=2, value_heads=6, key_size=16, value_size=8)


def filled(running=3, snapshots=2):
    pool = allocate_states(SHAPE, running, snapshots, torch.float32)
    for part in pool.whole:
        part.copy_(torch.randn(part.shape) * 100)
    return pool


def test_slots_and_snapshots_have_the_bytes_that_are_planned():
    pool = allocate_states(SHAPE, 3, 2, torch.bfloat16)
    held = sum(part.nbytes for part in pool.whole)
    planned = 4 * SHAPE.slot_bytes(torch.bfloat16) + 2 * SHAPE.snapshot_bytes(torch.bfloat16)
    assert held == planned and SHAPE.channels == 2 * 2 * 16 + 6 * 8
    assert pool.layers[0].boundary.shape == (6, 6, 16, 8) and pool.pad_slot == 3


def test_a_slot_is_cleared_alone_and_to_positive_zeros():
    pool = filled()
    before = [(state.boundary.clone(), state.inputs.clone()) for state in pool.layers]
    pool.clear(1)
    for state, old in zip(pool.layers, before, strict=True):
        for part, kept in zip((state.boundary, state.inputs), old, strict=True):
            cleared = part[1] if part is state.boundary else part[1, [125, 126, 127]]
            assert not cleared.any() and not torch.signbit(cleared).any()
            assert torch.equal(part[[0, 2]], kept[[0, 2]])


def test_a_restored_slot_has_the_boundary_and_the_three_rows_before_the_position():
    pool, position = filled(), 256
    pool.keep_tail(0, snapshot=1, position=position)
    rows = [state.inputs[0, [(position - i) % 128 for i in (3, 2, 1)]] for state in pool.layers]
    kept = [state.boundary[5].clone() for state in pool.layers]
    pool.restore(snapshot=1, slot=2, position=position)
    for state, row, boundary in zip(pool.layers, rows, kept, strict=True):
        assert torch.equal(state.inputs[2, [125, 126, 127]], row)
        assert torch.equal(state.boundary[2], boundary)


def test_no_memory_is_refused_with_the_size_and_the_remedy(monkeypatch):
    def short(*args, **named):
        raise RuntimeError("no memory")

    monkeypatch.setattr(module.torch, "zeros", short)
    said = r"states of 4000 sequences and 9 snapshots .* GiB\) on cpu: lower --max-num-seqs"
    with pytest.raises(ResourceError, match=said):
        allocate_states(SHAPE, 4000, 9, torch.bfloat16)
