"""Weights that arrive on a GPU: digests, bits, graphs, memory and times; CUDA IPC and NCCL.

python -m tests.gpu.engine.weights [SHAPE]        (times and memory; qwen3-8b by default)
python -m tests.gpu.engine.weights nccl           (the check of bits that needs two GPUs)
torchrun --nproc-per-node 2 -m tests.gpu.engine.weights updates 50 [FILE]
                              (so many updates in a row; also without torchrun, on one GPU)

FILE is a results file, or a folder of them, to which `updates` appends its rows.
"""

import base64
import ctypes
import json
import multiprocessing
import random
import sys
import tempfile
import time
from pathlib import Path

import blake3
import torch

from tests.gpu.lib.suite import Check
from tests.lib.bits import assert_same_bits
from tests.lib.engine_harness import ask, run
from tests.lib.weight_sender import LocalSender, info_of, tensors_of
from tpdet.checkpoint.model_config.known_shapes import write_shape
from tpdet.checkpoint.transfer import nccl
from tpdet.checkpoint.transfer.announced import announced
from tpdet.checkpoint.transfer.carriers import chunks_of
from tpdet.comm.device import open_world
from tpdet.comm.world.world import SoloWorld
from tpdet.config import EngineConfig
from tpdet.control.weight_orders import CarrierInfo, TensorsInfo
from tpdet.engine import Engine
from tpdet.kernels.cuda.digests.blake3 import blake3_of
from tpdet.tools.measurement.results_file import append_run
from tpdet.tools.synthetic.make_model import make_model
from tpdet.tools.worlds.machine import machine

SIZES = {"hidden": 512, "layers": 2, "heads": 8, "kv_heads": 2, "intermediate": 1024, "vocab": 1100}
FAMILIES = ("qwen3", "qwen2", "phi3", "qwen3_moe", "gpt_oss", "glm4_moe")
LONG_RUN = {"qwen3": {"kv_heads": 8}, "qwen2": {}, "qwen3_moe": {}}
"""The models of `updates`, qwen2's with a tied head, and how they differ from the others."""
CHUNK = 1 << 30
ALLOWED = 512 << 20


def check_digests():
    """Every length around a chunk's ends, slices, and 300 MB at once."""
    draw = torch.Generator("cuda").manual_seed(1)
    parts, headers = [], []
    for size in (0, 1, 63, 64, 65, 1023, 1024, 1025, 5000, 1 << 20, (1 << 20) + 1, 300 << 20):
        parts.append(torch.randint(0, 256, (size,), generator=draw, device="cuda").byte())
        headers.append(f"size {size}\n".encode())
    parts.append(torch.randn(512, 4096, generator=draw, device="cuda").bfloat16()[:, 512:1024])
    headers.append(b"columns\n")
    for header, part, digest in zip(headers, parts, blake3_of(headers, parts), strict=True):
        raw = part.contiguous().view(-1).view(torch.uint8).cpu().numpy()
        expected = blake3.blake3(header).update(raw.data).digest()
        assert digest == expected, f"{header!r}: another digest than the library's"
    return {"messages": len(parts)}


class Turns(LocalSender):
    """Hands out the tensors of models in turn, those of one an update, on every rank alike."""

    def __init__(self, models):
        super().__init__()
        self.models, self.updates = models, 0

    def receive(self, tensors, info, take, tick):
        """As `WeightCarrier.receive`."""
        self.updates += 1
        self.tensors = self.models[self.updates % len(self.models)]
        super().receive(tensors, info, take, tick)


def check_update(family, updates=2, world=None, **options):
    """Updates in a row with graphs: each digest and logit is that of a fresh start.

    Three models take turns. world: that of this rank; None for one. Ranks above 0 get None.
    """
    world = world or SoloWorld()
    with tempfile.TemporaryDirectory() as folder:
        shape = SIZES | {"dtype": "bfloat16", "tie": family == "qwen2"} | options
        models = [make_model(Path(folder) / str(i), like=family, seed=i, **shape) for i in range(3)]
        tensors = [tensors_of(model) for model in models]
        for name, values in tensors[0].items():
            assert not torch.equal(values, tensors[1][name]), f"{name} stays as it was"
        turns = [number % 3 for number in range(1, updates + 1)]
        draw = random.Random(1)
        prompt = [draw.randrange(1024) for _ in range(300)]

        def asked(name):
            return [ask(name, prompt), ask(f"{name}s", prompt[:40], temperature=0.9, seed=3)]

        sender = Turns([{name: each.cuda() for name, each in of.items()} for of in tensors])
        waves, digests = [], []

        def swap(engine):
            names = sorted(tensors[0])
            random.Random(sender.updates).shuffle(names)
            engine.weights.start_update()
            engine.weights.update(info_of(tensors[0], names))
            digests.append(engine.weights.finish_update())

        for number in range(updates):
            waves += [swap, asked(f"n{number}")]
        settings = {"device": "cuda", "change": sender.joined, "waves": waves}
        found = run(models[0], asked("a"), world=world, **settings)
        if found is None:
            return None
        fresh = [run(model, asked("a"), device="cuda") for model in models]
        rows = 0
        for number, which in enumerate(turns):
            for suffix in ("", "s"):
                name = f"n{number}{suffix}"
                assert found.answer(name) == fresh[which].answer("a" + suffix), name
                for key in [key for key in found.logits if key[0] == name]:
                    alone = fresh[which].logits["a" + suffix, *key[1:]]
                    assert_same_bits(found.logits[key], alone, str(key))
                    rows += 1
        started = [engine_of(model).weights.digest for model in models]
        wanted = [started[which] for which in turns]
        assert digests == wanted, "digests of a start read the files' bytes on the CPU"
    return {"updates": len(digests), "rows of logits": rows}


def updates_in_a_row(count, file=None):
    """`check_update` of LONG_RUN on the ranks of a launcher, or on one; rank 0 says what came."""
    world = open_world("cuda", 600.0)
    launch = "python" if world.size == 1 else f"torchrun --nproc-per-node {world.size}"
    command = f"{launch} -m tests.gpu.engine.weights updates {count} FILE"
    for family, options in LONG_RUN.items():
        seen = check_update(family, count, world, **options)
        world.set_timeout(600.0)  # an engine's own was shorter
        if seen is None:
            continue
        row = {
            "case": "updates in a row, digests and logits of a fresh start",
            "model": family,
            "dtype": "bfloat16",
            "tp": world.size,
            "value": seen.pop("updates"),
            "unit": "equal",
        }
        print(json.dumps(row | seen), flush=True)
        if file is not None:
            append_run(Path(file), "updates", machine("cuda", world.size), command, [row | seen])
    world.close()


def engine_of(model, **settings):
    settings = {"max_model_len": 1024, "kv_pages": 64, "device": "cuda"} | settings
    return Engine(EngineConfig.from_values(model=str(model), **settings), SoloWorld())


def ipc_handle(tensor):
    """A handle as trainers make it: the allocation's, and where a tensor lies, by GPU."""
    runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
    driver = ctypes.CDLL("libcuda.so.1")
    handle = (ctypes.c_byte * 64)()
    pointer = ctypes.c_void_p(tensor.data_ptr())
    base, size = ctypes.c_void_p(), ctypes.c_size_t()
    with torch.cuda.device(tensor.device):
        assert runtime.cudaIpcGetMemHandle(handle, pointer) == 0
        assert driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), pointer) == 0
    entry = {
        "handle": base64.b64encode(bytes(handle)).decode(),
        "offset": tensor.data_ptr() - base.value,
        "size": tensor.nbytes,
    }
    uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
    return {uuid: base64.b64encode(json.dumps(entry).encode()).decode()}


def _ipc_trainer(pipe, tensors):
    """Another process with the tensors on the same GPU, until it is told to end."""
    held = [tensor.cuda() for tensor in tensors]
    torch.cuda.synchronize()
    pipe.send([ipc_handle(tensor) for tensor in held])
    pipe.recv()


def check_ipc():
    """A trainer in another process on this GPU: the digest is that of a fresh start."""
    with tempfile.TemporaryDirectory() as folder:
        models = [
            make_model(Path(folder) / str(i), like="qwen3", seed=i, dtype="bfloat16", **SIZES)
            for i in (0, 1)
        ]
        tensors = tensors_of(models[1])
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        trainer = context.Process(target=_ipc_trainer, args=(theirs, [*tensors.values()]))
        trainer.start()
        info = info_of(tensors)
        whole = TensorsInfo(
            names=info.names,
            dtype_names=info.dtype_names,
            shapes=info.shapes,
            ipc_handles=ours.recv(),
        )
        engine = engine_of(models[0])
        engine.weights.open_carrier(CarrierInfo(backend="ipc"))
        engine.weights.start_update()
        engine.weights.update(whole)
        digest = engine.weights.finish_update()
        ours.send(None)
        trainer.join()
        assert digest == engine_of(models[1]).weights.digest
    return {"tensors": len(tensors)}


class NcclTrainer:
    """Rank 0 of a group, as vLLM's trainer side calls NCCL; on the last GPU unless one is named."""

    def __init__(self, world, gpu=-1):
        self.library, self.world = nccl.nccl_library(), world
        self.unique = nccl.UniqueId()
        assert self.library.ncclGetUniqueId(ctypes.byref(self.unique)) == 0
        self.device = torch.device("cuda", gpu if gpu >= 0 else torch.cuda.device_count() - 1)

    @property
    def text(self):
        return base64.b64encode(bytes(self.unique)).decode()

    def join(self):
        """Connect, and the one-element sum that every rank begins with."""
        self.communicator = ctypes.c_void_p()
        with torch.cuda.device(self.device):
            pointer = ctypes.byref(self.communicator)
            assert self.library.ncclCommInitRank(pointer, self.world, self.unique, 0) == 0
            self.run(torch.zeros(1, device=self.device), self.library.ncclAllReduce)

    def run(self, tensor, operation):
        stream = torch.cuda.current_stream(self.device)
        pointer, kind = tensor.data_ptr(), nccl.NCCL_DTYPES[tensor.dtype]
        with torch.cuda.device(self.device):
            result = operation(
                pointer, pointer, tensor.numel(), kind, 0, self.communicator, stream.cuda_stream
            )
            assert result == 0
            stream.synchronize()

    def send(self, tensors, packed):
        """Broadcast one by one, or joined by vLLM's rule."""
        flat = {name: tensor.to(self.device) for name, tensor in tensors.items()}
        if not packed:
            for tensor in flat.values():
                self.run(tensor, self.library.ncclBroadcast)
            return
        info = info_of(tensors)
        for chunk in chunks_of(announced(info.names, info.dtype_names, info.shapes), packed):
            joined = torch.cat([flat[t.name].view(-1).view(torch.uint8) for t in chunk])
            self.run(joined, self.library.ncclBroadcast)


def check_nccl():
    """A sender on the second GPU, packed and not; one that stops is given up in time."""
    from threading import Thread

    assert torch.cuda.device_count() > 1, "this check needs two GPUs"
    with tempfile.TemporaryDirectory() as folder:
        models = [
            make_model(Path(folder) / str(i), like="qwen3", seed=i, dtype="bfloat16", **SIZES)
            for i in (0, 1)
        ]
        tensors = tensors_of(models[1])
        expected = engine_of(models[1]).weights.digest
        engine = engine_of(models[0], weights_timeout=20.0)
        for packed in (0, 1 << 20):
            trainer = NcclTrainer(2)
            thread = Thread(target=lambda t=trainer, p=packed: (t.join(), t.send(tensors, p)))
            thread.start()
            engine.weights.open_carrier(
                CarrierInfo(
                    nccl_unique_id_b64=trainer.text,
                    world_size=2,
                    packed=bool(packed),
                    packed_buffer_size_bytes=packed or 1,
                )
            )
            engine.weights.start_update()
            engine.weights.update(info_of(tensors))
            thread.join()
            assert engine.weights.finish_update() == expected
            engine.weights.close_carrier()
    return {"updates": 2}


def weight_checks():
    """Every check that one GPU can make."""
    checks = [Check("digests", check_digests), Check("ipc", check_ipc)]
    return [*checks, *(Check(f"update {family}", check_update, (family,)) for family in FAMILIES)]


def measure(shape):
    """Seconds from the first byte to the commit, and the memory beside the serving state."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_shape(Path(folder) / shape, shape)
        engine = engine_of(model, load_format="dummy", kv_pages=256)
        reads = engine.runner.loaded.loader.reads
        draw = torch.Generator("cuda").manual_seed(1)
        for round_number in range(3):
            info = TensorsInfo(
                names=[read.name for read in reads],
                dtype_names=["bfloat16"] * len(reads),
                shapes=[list(read.shape) for read in reads],
            )
            chunks = [*chunks_of(announced(info.names, info.dtype_names, info.shapes), CHUNK)]
            sender = LocalSender()
            sender.joined(engine)
            engine.weights.start_update()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            seconds, largest, peak = 0.0, 0, before
            for chunk in chunks:
                largest = max(largest, sum(tensor.size for tensor in chunk))
                sender.tensors = {
                    tensor.name: torch.randn(tensor.shape, generator=draw, device="cuda").to(
                        torch.bfloat16
                    )
                    for tensor in chunk
                }
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                part = TensorsInfo(
                    names=[tensor.name for tensor in chunk],
                    dtype_names=["bfloat16"] * len(chunk),
                    shapes=[list(tensor.shape) for tensor in chunk],
                )
                begin = time.perf_counter()
                engine.weights.update(part)
                seconds += time.perf_counter() - begin
                peak = max(peak, torch.cuda.max_memory_allocated())
            begin = time.perf_counter()
            engine.weights.finish_update()
            seconds += time.perf_counter() - begin
            extra = max(peak, torch.cuda.max_memory_allocated()) - before
            print(
                f"{shape}, round {round_number}: {seconds:.2f} s in place and digested, "
                f"{extra / 2**30:.2f} GiB beside the serving state, chunk {largest / 2**30:.2f}",
                flush=True,
            )
            assert extra <= largest + ALLOWED


if __name__ == "__main__":
    if sys.argv[1:] == ["nccl"]:
        print(check_nccl())
    elif sys.argv[1:2] == ["updates"]:
        updates_in_a_row(int(sys.argv[2]), *sys.argv[3:4])
    else:
        measure(*(sys.argv[1:] or ["qwen3-8b"]))
