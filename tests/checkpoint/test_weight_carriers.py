"""What carries weights: chunks, groups that are met, senders that die, messages refused."""

import base64
import ctypes
import json
import math
import os
import pickle
import pickletools
import signal
import threading
import time

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import TCPStore

from tests.lib.bits import assert_same_bits
from tests.lib.engine_harness import small_config
from tests.lib.gloo_trainer import GROUP_NAME, start_trainer
from tests.lib.ports import free_port
from tests.lib.thread_world import run_threads
from tests.lib.weight_sender import info_of, tensors_of
from tpdet.checkpoint.transfer.announced import AnnouncedTensor, announced
from tpdet.checkpoint.transfer.carriers import TICK_SECONDS, chunks_of, cut_chunk, wait_ticking
from tpdet.checkpoint.transfer.cuda_ipc import parse_handle
from tpdet.checkpoint.transfer.open import check_carrier
from tpdet.checkpoint.transfer.rendezvous import parse_unique_id, unique_id_of
from tpdet.comm.world.world import SoloWorld
from tpdet.control.weight_orders import CarrierInfo, TensorsInfo
from tpdet.engine import Engine
from tpdet.errors import WeightUpdateError

DTYPES = ("bfloat16", "float32", "float16")


def some_tensors(count=40):
    draw = torch.Generator().manual_seed(4)
    shapes = torch.randint(1, 9, (count, 2), generator=draw).tolist()
    return announced([f"t{i}" for i in range(count)], [DTYPES[i % 3] for i in range(count)], shapes)


@pytest.mark.parametrize("size", [1, 16, 100, 257, 10**6])
def test_chunks_are_cut_where_a_sender_cuts_them(size):
    tensors = some_tensors()
    chunks = [*chunks_of(tensors, size)]
    assert [tensor for chunk in chunks for tensor in chunk] == tensors
    for chunk in chunks[:-1]:
        total = sum(tensor.size for tensor in chunk)
        assert total > size >= total - chunk[-1].size
    assert len(chunks) > 1 or size == 10**6
    assert [*chunks_of([], size)] == []


def test_a_chunk_is_cut_into_its_tensors_wherever_they_begin():
    tensors = some_tensors()
    values = [
        torch.randn(tensor.shape, generator=torch.Generator().manual_seed(i)).to(tensor.dtype)
        for i, tensor in enumerate(tensors)
    ]
    joined = torch.cat([value.view(torch.uint8).view(-1) for value in values])
    assert any(sum(t.size for t in tensors[:i]) % t.dtype.itemsize for i, t in enumerate(tensors))
    cut = cut_chunk(joined, tensors)
    for tensor, value in zip(tensors, values, strict=True):
        assert_same_bits(cut[tensor.name], value, tensor.name)


class ncclUniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class Trap:
    def __reduce__(self):
        return os.abort, ()


ID = bytes(range(128))


@pytest.mark.parametrize("protocol", [4, 5])
def test_the_one_object_that_may_come_is_read_by_its_form(protocol):
    data = pickle.dumps(ncclUniqueId.from_buffer_copy(ID), protocol=protocol)
    assert parse_unique_id(data) == ID
    optimised = pickletools.optimize(data)
    wrong = [
        data[:-1],
        data + b".",
        optimised,
        b"",
        data.replace(b"ncclUniqueId", b"ncclUniqueIf"),
        data.replace(b"_unpickle", b"_unpicklf"),
        data.replace(b"\x07_ctypes", b"\x07_xtypes"),
        pickle.dumps(Trap(), protocol=protocol),
        pickle.dumps(ID, protocol=protocol),
        pickle.dumps(ncclUniqueId.from_buffer_copy(ID), protocol=3),
        pickle.dumps((ncclUniqueId.from_buffer_copy(ID),), protocol=protocol),
    ]
    for each in wrong:
        with pytest.raises(WeightUpdateError, match="no NCCL unique id"):
            parse_unique_id(each)


def nccl(**fields):
    return CarrierInfo(**{"backend": "nccl", "world_size": 2} | fields)


def test_a_unique_id_comes_as_base64_too():
    text = base64.b64encode(ID).decode()
    assert unique_id_of(nccl(nccl_unique_id_b64=text), 1, 1.0) == ID
    for wrong in (
        text[:-4],
        text + "AAAA",
        "?" * 172,
        base64.urlsafe_b64encode(b"\xff" * 128).decode(),
    ):
        with pytest.raises(WeightUpdateError, match="nccl_unique_id_b64"):
            unique_id_of(nccl(nccl_unique_id_b64=wrong), 1, 1.0)


@pytest.mark.parametrize("barrier", [True, False])
def test_a_unique_id_comes_over_a_senders_store_whether_it_has_a_barrier_or_not(barrier):
    port, met = free_port(), []
    name = "barrier_0f0e-11"

    def trainer():
        store = TCPStore("127.0.0.1", port, 3, is_master=True, use_libuv=False)
        store.set("broadcast_from/0/0", pickle.dumps(ncclUniqueId.from_buffer_copy(ID)))
        if barrier:
            store.set("broadcast_from/0/1", pickle.dumps(name))
            for phase in ("arrival", "departure"):
                met.extend(store.get(f"{phase}_{name}_{rank}") for rank in (1, 2))
        done.wait(10)

    done = threading.Event()
    thread = threading.Thread(target=trainer)
    thread.start()
    info = nccl(master_address="127.0.0.1", master_port=port, world_size=3)

    def one_rank(world):
        return unique_id_of(info, world.rank + 1, 10.0)

    found = run_threads(2, one_rank)
    deadline = time.monotonic() + 5
    while barrier and len(met) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    done.set()
    thread.join()
    assert found == [ID, ID] and met == [b"1"] * (4 if barrier else 0)


def test_a_sender_that_is_not_there_is_told_in_time():
    began = time.monotonic()
    for backend in ("nccl", "gloo"):
        info = CarrierInfo(
            backend=backend, master_address="127.0.0.1", master_port=free_port(), world_size=2
        )
        engine = None
        if backend == "nccl":
            with pytest.raises(WeightUpdateError, match="the sender's store") as error:
                unique_id_of(info, 1, 0.5)
        else:
            engine = gloo_engine(0.5)
            with pytest.raises(WeightUpdateError, match=r"gloo group at 127.0.0.1") as error:
                engine.weights.open_carrier(info)
            assert engine.weights.state == "whole" and engine.runner.weights.carrier is None
        assert error.value.status == 502
    assert time.monotonic() - began < 10


MODEL = []


@pytest.fixture(scope="module", autouse=True)
def _models(tiny_model):
    MODEL[:] = [tiny_model("qwen3", kv_heads=2, seed=seed) for seed in (0, 1)]


def gloo_engine(timeout=20.0, world=None):
    return Engine(small_config(MODEL[0], weights_timeout=timeout), world or SoloWorld())


def gloo(port, world, **fields):
    """How the trainer's group is joined."""
    where = {"master_address": "127.0.0.1", "master_port": port, "world_size": world}
    return CarrierInfo(backend="gloo", group_name=GROUP_NAME, **where, **fields)


def trainer(port, world, names, packed=0, die_after=-1, path=None):
    path = path or MODEL[1] / "model.safetensors"
    return start_trainer(path, port, world, names, packed, die_after)


def ended(sender):
    """The exit code of a trainer."""
    sender.join(60)
    return sender.exitcode


@pytest.mark.parametrize(("tp", "packed"), [(1, 0), (2, 300_000)])
def test_a_trainers_gloo_group_brings_the_weights_to_every_rank(tp, packed):
    tensors, port = tensors_of(MODEL[1]), free_port()
    names = sorted(tensors, reverse=True)
    sender = trainer(port, tp + 1, names, packed)
    carrier = gloo(port, tp + 1, packed=bool(packed), packed_buffer_size_bytes=packed or 1)
    ticks = []

    def one_rank(world):
        engine = gloo_engine(60.0, world)
        if world.rank:
            return engine.worker_loop()
        engine.weights.open_carrier(carrier, lambda: ticks.append(1))
        engine.weights.start_update()
        engine.weights.update(info_of(tensors, names), lambda: ticks.append(2))
        digest = engine.weights.finish_update("step-1")
        engine.weights.close_carrier()
        engine.stop_workers()
        return digest

    digest = run_threads(tp, one_rank)[0]
    assert ended(sender) == 0
    other = Engine(small_config(MODEL[1]), SoloWorld())
    assert digest == other.weights.digest
    assert 1 in ticks and 2 in ticks


def test_a_trainer_that_is_killed_is_given_up_and_another_heals():
    tensors, port = tensors_of(MODEL[1]), free_port()
    names = sorted(tensors)
    engine = gloo_engine(30.0)
    sender = trainer(port, 2, names, die_after=7)
    info = gloo(port, 2)
    engine.weights.open_carrier(info)
    engine.weights.start_update()
    began = time.monotonic()
    with pytest.raises(WeightUpdateError, match="the sender is gone") as error:
        engine.weights.update(info_of(tensors, names))
    assert error.value.status == 502 and time.monotonic() - began < 20
    assert engine.weights.state == "torn" and engine.runner.weights.carrier is None
    assert ended(sender) == -signal.SIGKILL
    with pytest.raises(WeightUpdateError, match="not complete") as unfinished:
        engine.weights.finish_update()
    assert unfinished.value.missing == tuple(names[7:])
    port = free_port()
    sender = trainer(port, 2, names)
    engine.weights.open_carrier(gloo(port, 2))
    engine.weights.start_update()
    engine.weights.update(info_of(tensors, names))
    assert engine.weights.finish_update() and engine.weights.usable
    assert ended(sender) == 0


def test_a_trainer_that_ends_or_is_silent_is_given_up_in_time():
    tensors, port = tensors_of(MODEL[1]), free_port()
    names = sorted(tensors)
    sender = trainer(port, 2, names[:5])  # it ends, though it announces more
    engine = gloo_engine(8.0)
    engine.weights.open_carrier(gloo(port, 2))
    engine.weights.start_update()
    began, ticks = time.monotonic(), []
    with pytest.raises(WeightUpdateError) as error:
        engine.weights.update(info_of(tensors, names), lambda: ticks.append(1))
    waited = time.monotonic() - began
    assert error.value.status == 502
    assert waited < 20 and engine.weights.state == "torn"
    assert len(ticks) <= 2 * len(names) + waited / TICK_SECONDS, "no busy wait"
    assert ended(sender) == 0


@pytest.mark.parametrize(
    ("sent", "packed", "copies"),
    [("float32", 0, 1), ("float32", 0, 5), ("bfloat16", 0, 1), ("bfloat16", 10**9, 1)],
)
def test_a_trainer_that_sends_other_bytes_than_it_says_is_refused(tmp_path, sent, packed, copies):
    """gloo ends the process where more comes, and says nothing where less does."""
    says = {"float32": "bfloat16", "bfloat16": "float32"}[sent]
    tensors, port, path = tensors_of(MODEL[1]), free_port(), tmp_path / "sent"
    dtype = getattr(torch, sent)
    save_file({name: t.to(dtype).repeat(copies, 1) for name, t in tensors.items()}, path)
    names = sorted(tensors)
    sender = trainer(port, 2, names, packed, path=path)
    engine, told = gloo_engine(20.0), info_of(tensors, names)  # the sender has to start, too
    engine.weights.open_carrier(
        gloo(port, 2, packed=bool(packed), packed_buffer_size_bytes=packed or 1)
    )
    engine.weights.start_update()
    how = r"has not sent the \d+ bytes that it announced, but " + (
        "more" if sent == "float32" else "fewer"
    )
    with pytest.raises(WeightUpdateError, match=how) as error:
        engine.weights.update(msgspec.structs.replace(told, dtype_names=[says] * len(names)))
    assert error.value.status == 400 and engine.weights.state == "torn"
    engine.weights.start_update()
    engine.weights.update(TensorsInfo(weight_dir=str(MODEL[1])))
    assert engine.weights.finish_update() and engine.weights.usable
    sender.kill()
    sender.join()


def test_waiting_ends_in_time_and_ticks():
    ticks, release = [], threading.Event()
    began = time.monotonic()
    with pytest.raises(WeightUpdateError, match=r"the store: nothing came in 0.3 s") as error:
        wait_ticking(lambda: release.wait(10), lambda: ticks.append(1), "the store", 0.3)
    waited = time.monotonic() - began
    release.set()
    assert error.value.status == 502 and waited < 5
    assert 1 <= len(ticks) <= 1 + waited / TICK_SECONDS
    assert wait_ticking(lambda: 7, lambda: None, "x", 5.0) == 7


HERE = {"master_address": "127.0.0.1", "master_port": 1, "world_size": 3}
WRONG = [
    ({"backend": "nccl"} | HERE, "needs a GPU: use gloo"),
    ({"backend": "gloo"} | HERE | {"world_size": 2}, r"rank_offset 1 and 2 ranks .* it takes 3"),
    ({"backend": "gloo"} | HERE | {"rank_offset": 0}, "rank_offset 0"),
    ({"backend": "gloo", "world_size": 3}, "needs master_address"),
    ({"backend": "gloo"} | HERE | {"master_port": 70000}, "needs master_address"),
    ({"backend": "gloo"} | HERE | {"packed_buffer_size_bytes": 0}, "packed_buffer_size_bytes is 0"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_a_group_that_cannot_be_joined_is_refused_by_name(fields, message):
    with pytest.raises(WeightUpdateError, match=message) as error:
        check_carrier(CarrierInfo(**fields), 2, torch.device("cpu"))
    assert error.value.status == 400
    check_carrier(CarrierInfo(backend="gloo", **HERE), 2, torch.device("cpu"))


def test_an_nccl_group_is_met_one_way_on_a_gpu():
    gpu, text = torch.device("cuda"), base64.b64encode(ID).decode()
    check_carrier(nccl(nccl_unique_id_b64=text), 1, gpu)
    check_carrier(nccl(master_address="127.0.0.1", master_port=5), 1, gpu)
    for fields in ({}, {"nccl_unique_id_b64": text, "master_address": "a", "master_port": 5}):
        with pytest.raises(WeightUpdateError, match="one of the two"):
            check_carrier(nccl(**fields), 1, gpu)


def handle(**fields):
    raw = base64.b64encode(b"h" * 64).decode()
    values = {"handle": raw, "offset": 512, "size": 24} | fields
    return base64.b64encode(json.dumps(values).encode()).decode()


def test_handles_of_gpu_memory_are_json_and_nothing_else():
    tensor = AnnouncedTensor("t", torch.float32, (2, 3))
    assert math.prod(tensor.shape) * 4 == 24
    assert parse_handle(handle(), tensor) == (b"h" * 64, 512)
    wrong = [
        handle(size=20),
        handle(offset=-1),
        handle(handle="aGg="),
        handle(handle="?"),
        handle(function="rebuild_cuda_tensor"),
        base64.b64encode(pickle.dumps((Trap(),))).decode(),
        "no base64",
    ]
    for text in wrong:
        with pytest.raises(WeightUpdateError, match="ipc_handles of tensor t"):
            parse_handle(text, tensor)


def test_the_fields_of_vllms_other_form_are_not_known():
    with pytest.raises(msgspec.ValidationError, match="ipc_handles_pickled"):
        msgspec.convert({"names": [], "ipc_handles_pickled": "gASV"}, TensorsInfo)
