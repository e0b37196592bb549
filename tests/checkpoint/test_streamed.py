"""Pieces streamed through buffers by many threads have the bits and digests of whole reads."""

import os
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.lib.bits import assert_same_bits
from tpdet.checkpoint.checkpoint import open_checkpoint
from tpdet.checkpoint.finite import all_finite, bits_finite
from tpdet.checkpoint.pieces import Pieces, TensorRead
from tpdet.checkpoint.source import WeightSource
from tpdet.checkpoint.staging import BUFFER_BYTES, Chunk, Staging
from tpdet.errors import CheckpointError

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ODD_ROWS = BUFFER_BYTES // 999 + 3  # its pieces need more than one buffer, which ends within a row


class Turns:
    """Stands for an event: between two fillings of a buffer come its record and its wait."""

    def __init__(self, log):
        self._log = log

    def synchronize(self):
        self._log.append("waited")

    def record(self):
        self._log.append("copied")


def staged(threads=1, logs=None):
    def make_buffer():
        log = []
        if logs is not None:
            logs.append(log)
        return torch.full((BUFFER_BYTES,), 255, dtype=torch.uint8), Turns(log)

    return {"threads": threads, "staging": Staging(CPU, make_buffer)}


def cut(extent, dim, mine=None, kept=None):
    edges = [0, extent // 3 - 1, extent // 2 + 1, extent]
    bounds = tuple(pairwise(edges))
    return Pieces(dim, bounds, range(3) if mine is None else mine, kept)


def tensors(dtype):
    generator = torch.Generator().manual_seed(5)
    made = {}
    for layer in range(4):
        at = f"model.layers.{layer}."
        made[f"{at}rows"] = torch.randn(ODD_ROWS, 999, generator=generator).to(dtype)
        made[f"{at}columns"] = torch.randn(2051, 613, generator=generator).to(dtype)
        made[f"{at}norm"] = torch.randn(77, generator=generator).to(dtype)
        for expert in range(9):
            made[f"{at}experts.{expert}"] = torch.randn(31, 17, generator=generator).to(dtype)
    return made


READS = {
    "rows": ((ODD_ROWS, 999), cut(ODD_ROWS, 0)),
    "columns": ((2051, 613), cut(613, 1, range(1, 3))),
    "norm": ((77,), Pieces.whole()),
}


def read_everything(source):
    found = {}
    for layer in range(4):
        at = f"model.layers.{layer}."
        for name, (shape, pieces) in READS.items():
            found[at + name] = source.read(at + name, shape, pieces)
        kept = Pieces.whole(range(5, 20))
        asked = [TensorRead(f"{at}experts.{i}", (31, 17), kept) for i in range(9)]
        found |= dict(zip((name for name, *_ in asked), source.read_all(asked), strict=True))
    return found, source.finish()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_threads_give_the_bits_and_digests_of_one_that_reads_whole(tmp_path, dtype):
    save_file(tensors(dtype), tmp_path / "model.safetensors")
    whole = open_checkpoint(tmp_path)
    whole.streamed = lambda *piece: None
    whole.piece = lambda piece, _: whole.unchecked_piece(piece)  # alone, with a read of its own
    known, digests = read_everything(WeightSource(whole, dtype, 0, False))
    logs = []
    source = WeightSource(
        open_checkpoint(tmp_path), dtype, 0, False, **staged(threads=16, logs=logs)
    )
    found, streamed = read_everything(source)
    assert streamed == digests and len(digests) == 4 * (3 + 2 + 1 + 9)
    for name, values in known.items():
        assert_same_bits(found[name], values)
    for log in logs:  # a buffer is never filled before its last copy was waited for
        assert log == ["waited", "copied"] * (len(log) // 2)
    assert sum(map(len, logs)) // 2 > len(digests)


def test_values_of_another_dtype_are_rounded_before_they_go_through_buffers(tmp_path):
    save_file(tensors(torch.float32), tmp_path / "model.safetensors")
    checkpoint, logs = open_checkpoint(tmp_path), []
    plain, streamed = (
        read_everything(WeightSource(checkpoint, torch.bfloat16, 0, False, **more))
        for more in ({}, staged(threads=4, logs=logs))
    )
    assert plain[1] == streamed[1]
    assert sum(log.count("copied") for log in logs) > len(plain[1])
    for name, values in plain[0].items():
        assert_same_bits(streamed[0][name], values)


def test_one_changed_bit_in_any_buffer_changes_the_digest(tmp_path):
    digests = set()
    for byte in (None, 0, BUFFER_BYTES, 4 * ODD_ROWS * 999 - 1):
        values = tensors(torch.float32)
        if byte is not None:
            values["model.layers.3.rows"].view(torch.int32).view(-1)[byte // 4] ^= 1
        save_file(values, tmp_path / "model.safetensors")
        source = WeightSource(
            open_checkpoint(tmp_path), torch.float32, 0, False, **staged(threads=3)
        )
        digests.add(tuple(sorted(read_everything(source)[1].values())))
    assert len(digests) == 4


@pytest.mark.parametrize("name", ["rows", "columns"])
@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_is_refused_by_file_and_tensor(tmp_path, name, value):
    values = tensors(torch.bfloat16)
    values[f"model.layers.2.{name}"][-1, -1] = value
    save_file(values, tmp_path / "model.safetensors")
    source = WeightSource(open_checkpoint(tmp_path), torch.bfloat16, 0, False, **staged(8))
    with pytest.raises(
        CheckpointError, match=rf"^model\.safetensors: tensor model\.layers\.2\.{name} holds NaN"
    ):
        read_everything(source)


@pytest.mark.parametrize("kind", ["rows", "columns"])
def test_a_file_that_is_cut_while_it_is_read_is_refused_once_and_by_name(tmp_path, kind):
    """A mapped file would end the process; each thread that shares a read hears of its error."""
    path = tmp_path / "model.safetensors"
    save_file(tensors(torch.bfloat16), path)
    source = WeightSource(open_checkpoint(tmp_path), torch.bfloat16, 0, False, **staged(8))
    os.truncate(path, path.stat().st_size // 2)
    shape, pieces = READS[kind]
    names = [f"model.layers.{layer}.{kind}" for layer in range(4)]
    with pytest.raises(
        CheckpointError,
        match=rf"^model\.safetensors: tensor .*{kind} cannot be read: the file ends",
    ) as refused:
        for name in names:
            source.read(name, shape, pieces)
    assert isinstance(refused.value.__cause__, EOFError)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_tell_what_values_tell(dtype):
    """Every pattern of 16 bits; of 32 bits those whose upper half is any, beside both extremes."""
    upper = np.arange(1 << 16, dtype=np.uint32)
    patterns = [upper.astype(np.uint16)]
    if dtype is torch.float32:
        patterns = [upper << 16, (upper << 16) | 0xFFFF]
    for bits in patterns:
        values = torch.from_numpy(bits.view(np.int32 if bits.itemsize == 4 else np.int16))
        expected = torch.isfinite(values.view(dtype))
        raw = bits.view(np.uint8).reshape(len(bits), -1)
        assert [bits_finite(each, dtype) for each in raw] == expected.tolist()
        finite, others = raw[expected.numpy()], raw[~expected.numpy()]
        assert bits_finite(finite.reshape(-1), dtype)
        mixed = np.concatenate([finite.reshape(-1), others[0]])
        assert not bits_finite(mixed, dtype)
        assert not all_finite(torch.from_numpy(mixed).view(dtype))
    assert bits_finite(np.empty(0, np.uint8), dtype)


def test_a_reload_of_the_cpu_copies_to_what_lies_on_another_device():
    elsewhere, filled = torch.empty(8, device="meta"), []

    def fill(staged):
        filled.append(staged.numpy().nbytes)

    Staging(CPU).send([Chunk(elsewhere.nbytes, fill, slice(None), elsewhere)])
    assert filled == [32]
