"""Checkpoints are read slice by slice, every tensor once; damage is refused by file and tensor."""

import json

import pytest
import torch
from safetensors.torch import save_file

from tests.lib.bits import assert_same_bits
from tests.lib.thread_world import run_threads
from tpdet.checkpoint.checkpoint import open_checkpoint
from tpdet.checkpoint.pieces import Pieces, TensorRead
from tpdet.checkpoint.resolve import is_model, resolve_model
from tpdet.checkpoint.source import WeightSource
from tpdet.comm.weight_digests import merge_digests
from tpdet.comm.world.world import SoloWorld
from tpdet.errors import (
    CheckpointError,
    DisagreementError,
    IntegrityError,
    NotFoundError,
)

WHOLE = Pieces.whole()
TENSORS = {
    "a.weight": torch.randn(32, 16, generator=torch.Generator().manual_seed(1)),
    "b.weight": torch.randn(16, 64, generator=torch.Generator().manual_seed(2)),
    "norm.weight": torch.ones(16),
}


def single(folder, tensors=None):
    save_file(tensors or TENSORS, folder / "model.safetensors")
    return folder


def sharded(folder, change=None):
    save_file({"a.weight": TENSORS["a.weight"]}, folder / "one.safetensors")
    rest = {k: v for k, v in TENSORS.items() if k != "a.weight"}
    save_file(rest, folder / "two.safetensors")
    mapping = {"a.weight": "one.safetensors"} | dict.fromkeys(rest, "two.safetensors")
    mapping.update(change or {})
    index = {"weight_map": {k: v for k, v in mapping.items() if v is not None}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def source(folder, dtype=torch.float32):
    return WeightSource(open_checkpoint(folder), dtype, 0, False)


def quarters(extent, dim, mine):
    width = extent // 4
    return Pieces(dim, tuple((i * width, (i + 1) * width) for i in range(4)), mine)


def read_all(found, rank=0, size=1):
    share = 4 // size
    mine = range(rank * share, (rank + 1) * share)
    rows = found.read("a.weight", (32, 16), quarters(32, 0, mine))
    columns = found.read("b.weight", (16, 64), quarters(64, 1, mine))
    found.read("norm.weight", (16,), WHOLE)
    return rows, columns


@pytest.mark.parametrize("make", [single, sharded])
def test_a_rank_gets_its_slices_and_only_those(tmp_path, make):
    make(tmp_path)
    rows, columns = read_all(source(tmp_path), rank=1, size=2)
    assert_same_bits(rows, TENSORS["a.weight"][16:])
    assert_same_bits(columns, TENSORS["b.weight"][:, 32:].contiguous())


def test_the_digest_does_not_depend_on_the_number_of_ranks(tmp_path):
    single(tmp_path)

    def digest(world):
        found = source(tmp_path)
        read_all(found, world.rank, world.size)
        return merge_digests(world, found.finish())

    digests = [digest(SoloWorld())] + [d for n in (2, 4) for d in run_threads(n, digest)]
    assert all(one == digests[0] for one in digests)
    assert digests[0].tensors.keys() == TENSORS.keys()


def test_one_changed_bit_changes_the_digest(tmp_path):
    digests = []
    for index, change in enumerate((0.0, 1e-7)):
        folder = tmp_path / str(index)
        folder.mkdir()
        changed = {k: v.clone() for k, v in TENSORS.items()}
        changed["b.weight"][3, 5] += change
        found = source(single(folder, changed))
        read_all(found)
        digests.append(merge_digests(SoloWorld(), found.finish()))
    before, after = digests
    assert before.whole != after.whole
    differing = [name for name in TENSORS if before.tensors[name] != after.tensors[name]]
    assert differing == ["b.weight"]


def test_ranks_that_read_other_bits_of_one_piece_are_told(tmp_path):
    folders = [tmp_path / "x", tmp_path / "y"]
    for index, folder in enumerate(folders):
        folder.mkdir()
        single(folder, TENSORS | {"norm.weight": torch.ones(16) + index})

    def run(world):
        found = source(folders[world.rank])
        read_all(found, world.rank, 2)
        merge_digests(world, found.finish())

    with pytest.raises(DisagreementError, match=r"tensor norm\.weight: rank 0 on .*, rank 1 on"):
        run_threads(2, run)


def test_bf16_is_widened_exactly_and_digested_as_stored(tmp_path):
    narrow = {k: v.bfloat16() for k, v in TENSORS.items()}
    found = source(single(tmp_path, narrow))
    assert_same_bits(read_all(found)[0], narrow["a.weight"].float())


def test_drawn_weights_are_the_same_at_every_size():
    drawn = [WeightSource(None, torch.float32, 7, False) for _ in range(3)]
    whole = read_all(drawn[0])
    halves = [read_all(found, rank, 2) for rank, found in enumerate(drawn[1:])]
    assert_same_bits(torch.cat([half[0] for half in halves]), whole[0])
    assert_same_bits(torch.cat([half[1] for half in halves], 1), whole[1])
    other = WeightSource(None, torch.float32, 8, False).read("a.weight", (32, 16), WHOLE)
    assert not torch.equal(other, whole[0])


@pytest.mark.parametrize("name", ["nan", "inf", "-inf"])
def test_values_that_are_not_finite_are_refused(tmp_path, name):
    bad = TENSORS["a.weight"].clone()
    bad[31, 15] = float(name)
    found = source(single(tmp_path, TENSORS | {"a.weight": bad}))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor a\.weight holds NaN"):
        read_all(found)


def test_a_wrong_shape_is_refused(tmp_path):
    found = source(single(tmp_path))
    with pytest.raises(CheckpointError, match=r"a\.weight has shape \[32, 16\].*\[16, 32\]"):
        found.read("a.weight", (16, 32), WHOLE)


def test_a_wrong_dtype_is_refused(tmp_path):
    found = source(single(tmp_path, {"a.weight": TENSORS["a.weight"].double()}))
    with pytest.raises(CheckpointError, match=r"a\.weight has dtype F64"):
        found.read("a.weight", (32, 16), WHOLE)


def test_a_missing_tensor_is_refused(tmp_path):
    found = source(single(tmp_path))
    with pytest.raises(CheckpointError, match=r"tensor c\.weight is in none of model\.safetensors"):
        found.read("c.weight", (1,), WHOLE)


def test_a_tensor_nobody_asked_for_is_refused(tmp_path):
    found = source(single(tmp_path))
    found.read("a.weight", (32, 16), WHOLE)
    with pytest.raises(CheckpointError, match=r"tensor b\.weight has no place in this model"):
        found.finish()


def test_a_tensor_read_twice_is_refused(tmp_path):
    found = source(single(tmp_path))
    found.read("a.weight", (32, 16), WHOLE)
    with pytest.raises(CheckpointError, match="twice"):
        found.read("a.weight", (32, 16), WHOLE)


def test_tensors_are_read_into_memory_that_is_there(tmp_path):
    """Whole and in pieces, into strided memory; its address stays, and other memory stays as is."""
    single(tmp_path)
    memory = torch.full((4, 2, 8, 16), torch.nan)
    rows, columns = memory[:, 1], torch.zeros(16, 128)
    wide = quarters(64, 1, range(1, 3))
    asked = [TensorRead("a.weight", (32, 16), WHOLE), TensorRead("b.weight", (16, 64), wide)]
    found = source(tmp_path)
    found.read_into(asked, [rows, columns[:, ::4]])
    assert_same_bits(rows.flatten(0, 1), TENSORS["a.weight"])
    assert_same_bits(columns[:, ::4].contiguous(), TENSORS["b.weight"][:, 16:48].contiguous())
    assert memory[:, 0].isnan().all() and not columns[:, 1::4].any()
    found.read("norm.weight", (16,), WHOLE)
    known = source(tmp_path)
    known.read("a.weight", (32, 16), WHOLE)
    known.read("b.weight", (16, 64), wide)
    known.read("norm.weight", (16,), WHOLE)
    assert found.finish() == known.finish()
    assert found.memory_for(memory, (4, 2, 8, 16)) is memory
    with pytest.raises(IntegrityError, match="restart the server"):
        found.memory_for(memory, (4, 2, 8, 32))
    with pytest.raises(IntegrityError, match="restart the server"):
        found.memory_for(memory.bfloat16(), (4, 2, 8, 16))


def test_stored_inverse_frequencies_are_ignored(tmp_path):
    extra = {"layers.0.rotary_emb.inv_freq": torch.ones(4)}
    found = source(single(tmp_path, TENSORS | extra))
    read_all(found)
    found.finish()


@pytest.mark.parametrize(("bits", "fits"), [(0.0, True), (1e-6, False)])
def test_a_stored_tied_head_must_have_the_embeddings_bits(tmp_path, bits, fits):
    twin = TENSORS["a.weight"] + bits
    found = source(single(tmp_path, TENSORS | {"head.weight": twin}))
    read_all(found)
    if fits:
        found.finish(("head.weight", "a.weight"))
        return
    with pytest.raises(CheckpointError, match=r"head\.weight is tied to a\.weight but has other"):
        found.finish(("head.weight", "a.weight"))


@pytest.mark.parametrize("keep", [4, 60, 500])
def test_a_truncated_file_is_refused(tmp_path, keep):
    path = single(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .* is truncated or damaged"):
        open_checkpoint(tmp_path)


def test_a_file_that_is_no_safetensors_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 4096)
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a.weight": "gone.safetensors"}, r"shard gone\.safetensors does not exist"),
        ({"a.weight": "two.safetensors"}, r"one of|a\.weight is missing"),
        ({"norm.weight": "one.safetensors"}, r"norm\.weight is listed|norm\.weight is missing"),
        ({"norm.weight": None}, r"norm\.weight is listed .* as in None"),
        ({"c.weight": "two.safetensors"}, r"two\.safetensors: tensor c\.weight is missing"),
        ({"a.weight": "../one.safetensors"}, "not a file of this directory"),
        ({"a.weight": 3}, "not a file of this directory"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path, change, message):
    sharded(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    sharded(tmp_path)
    twice = {"b.weight": TENSORS["b.weight"], "a.weight": TENSORS["a.weight"]}
    save_file(twice | {"norm.weight": TENSORS["norm.weight"]}, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"two\.safetensors: tensor a\.weight is also in one"):
        open_checkpoint(tmp_path)


def test_a_checkpoint_beside_another_is_refused(tmp_path):
    sharded(single(tmp_path))
    with pytest.raises(CheckpointError, match="holds both"):
        open_checkpoint(tmp_path)


def test_a_header_that_names_a_tensor_twice_is_refused(tmp_path):
    body = '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
    body += '"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    data = len(body).to_bytes(8, "little") + body.encode() + bytes(4)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match="duplicate key 'a'"):
        open_checkpoint(tmp_path)


def test_weights_are_copies_that_a_changed_file_cannot_reach(tmp_path):
    path = single(tmp_path) / "model.safetensors"
    found = source(tmp_path).read("norm.weight", (16,), WHOLE)
    with path.open("r+b") as file:
        size = path.stat().st_size
        file.seek(int.from_bytes(file.read(8), "little") + 8)
        file.write(bytes(size - file.tell()))
    assert torch.equal(found, torch.ones(16))


def test_values_that_overflow_the_models_dtype_are_refused(tmp_path):
    large = TENSORS | {"norm.weight": torch.full((16,), 1e6)}
    found = source(single(tmp_path, large), torch.float16)
    with pytest.raises(CheckpointError, match=r"norm\.weight holds values too large for"):
        found.read("norm.weight", (16,), WHOLE)


def test_pieces_must_cover_their_tensor(tmp_path):
    found = source(single(tmp_path))
    with pytest.raises(ValueError, match="do not cover dimension 0"):
        found.read("a.weight", (32, 16), Pieces(0, ((0, 8), (8, 16)), range(2)))


def test_a_directory_without_weights_is_not_found(tmp_path):
    with pytest.raises(NotFoundError, match="holds neither"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "a/b/c", "none.gguf"])
def test_a_model_that_is_no_directory_is_not_found(name):
    with pytest.raises(NotFoundError, match="is not a directory"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["", " "])
def test_a_name_that_is_empty_is_not_the_working_directory(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert is_model(".") and not is_model(name)
    with pytest.raises(NotFoundError, match=f"tokenizer '{name}' names nothing: give a "):
        resolve_model(name, what="tokenizer")


def test_a_model_may_be_named_by_a_path(tmp_path):
    assert resolve_model(tmp_path) == resolve_model(str(tmp_path)) == tmp_path


def test_a_shape_is_said_to_have_no_weights_and_not_looked_for_elsewhere(monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **b: pytest.fail("asked"))
    with pytest.raises(NotFoundError, match="make-model DIR --like-config qwen3-8b"):
        resolve_model("qwen3-8b")


def test_a_hub_name_without_a_network_is_not_found(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(NotFoundError, match="check the name and the network"):
        resolve_model("nobody/such-model")


def test_the_next_layer_is_read_meanwhile_and_only_as_it_is_asked_for(tmp_path):
    names = [f"model.layers.{i}.w" for i in range(3)]
    values = {name: torch.arange(64.0).reshape(8, 8) + i for i, name in enumerate(names)}
    save_file(values, tmp_path / "model.safetensors")
    checkpoint, begun = open_checkpoint(tmp_path), []
    streamed = checkpoint.streamed

    def noting(piece, *more):
        begun.append(piece.tensor.name)
        return streamed(piece, *more)

    halves = Pieces(0, ((0, 4), (4, 8)), range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "streamed", noting)
        source = WeightSource(checkpoint, torch.float32, 0, False, "cpu", 2)
        found = [source.read(names[0], (8, 8), halves), source.read(names[1], (8, 8), halves)]
        other = Pieces.whole()
        found.append(source.read(names[2], (8, 8), other))  # not as it was guessed: read again
        digests = source.finish()  # the guess has been read to its end, though for nothing
    for name, tensor in zip(names, found, strict=True):
        assert torch.equal(tensor, values[name])
    assert [begun.count(name) for name in names] == [2, 2, 3]
    assert set(digests) == {
        (names[0], 0),
        (names[0], 1),
        (names[1], 0),
        (names[1], 1),
        (names[2], 0),
    }
