"""One rank's step: check the plan, update the tables, run the model over the plan's rows.

Shape suffixes: M rows of the step, R rows whose logits are wanted, V vocabulary.
"""

import os
import struct
from collections.abc import Callable

import torch

from tpdet.cache.kv import KeyValuePages, allocate_pages, page_bytes
from tpdet.cache.versions import VersionTable, first_difference
from tpdet.comm.agreement import agree, collect_facts
from tpdet.comm.device import current_device, free_gpu_bytes, ranks_per_gpu, resolve_device
from tpdet.comm.world import World
from tpdet.config import EngineConfig
from tpdet.decode_graphs import DecodeGraphs, wait_for_gpu
from tpdet.errors import (
    DisagreementError,
    IntegrityError,
    PeerLostError,
    ResourceError,
    TpdetError,
    UsageError,
)
from tpdet.kernels.cpu import threads
from tpdet.kernels.cpu.admission import check_bit_classes
from tpdet.kernels.golden import golden_digest
from tpdet.kernels.known_answers import known_answers
from tpdet.kernels.order import GOLDEN_SHA256, PAGE_TOKENS, Contract
from tpdet.kernels.paged_batch import PagedSequence, make_batch
from tpdet.layers.partition import Partition, make_partition
from tpdet.model_config import ModelConfig, load_model_config
from tpdet.models.decoder import Decoder
from tpdet.models.warm_up import pages_needed, warm_up
from tpdet.plan import StepPlan
from tpdet.receipt import model_digest, system_fingerprint
from tpdet.weights.resolve import resolve_model
from tpdet.weights.source import merge_digests, open_weights

LOGIT_ROWS = 256  # rows of the output head computed at once, at most
LOAD_TIMEOUT = 3600.0  # seconds the ranks may be apart while they read weights
_CACHE_SHARE = 0.25  # of the memory that is free after loading, for the KV cache on the CPU
_LOCAL_FACTS = ("model", "tokenizer", "chat_template")  # paths may differ from host to host

_TIED = ("lm_head.weight", "model.embed_tokens.weight")

TakeLogits = Callable[[int, torch.Tensor], None]
"""Called with the index of the first row and a block of fp32 logits [<= 256, V]."""


class Runner:
    """This rank's share of the model, its KV pages and its version table."""

    _pages: KeyValuePages | None = None
    _graphs: DecodeGraphs | None = None
    num_pages = 0

    def __init__(self, config: EngineConfig, world: World) -> None:
        """Load the model. Every refusal (flags, checkpoint, ranks that differ) happens here."""
        self._world = world
        self._config = config
        kind = resolve_device(config.device)
        self.device = current_device(kind)
        directory = resolve_model(config.model, config.revision)
        self.model_config = load_model_config(directory, config.dtype)
        self.max_model_len = _context(config, self.model_config)
        partition = make_partition(self.model_config, world, config.fold_order, config.leaves)
        self.contract = Contract(
            kind, self.model_config.dtype, partition.leaves, config.fold_order
        ).identifier
        if kind == "cpu":
            threads.configure(_threads_per_rank())
        _check_kernels(self.model_config, partition, kind)
        settings = config.model_dump(exclude={*_LOCAL_FACTS}) | {"contract": self.contract}
        answers = known_answers(self.device, self._dtype)
        facts = {f"known answer {name}": digest for name, digest in answers.items()}
        agree(world, collect_facts(settings, kind) | facts)
        world.set_timeout(max(LOAD_TIMEOUT, config.step_timeout))
        source = open_weights(
            directory,
            self.model_config,
            config.load_format,
            config.seed,
            world.rank == 0,
            self.device,
        )
        self.model = Decoder(source, partition, self.max_model_len)
        tied = self.model_config.tie_word_embeddings
        self.model_digest = model_digest(
            self.model_config,
            merge_digests(world, source.finish(_TIED if tied else None)),
            (self.model.cos, self.model.sin),
        )
        self._key_heads = len(partition.key_heads)
        if kind == "cuda":
            self._warm_up(config)
        pages = self._agree_on_pages(config)
        world.set_timeout(config.step_timeout)
        self.reset_pages(pages)

    @property
    def system_fingerprint(self) -> str:
        """Names contract, model and architecture: what may change bits."""
        return system_fingerprint(self.contract, self.model_digest, self.device.type)

    def reset_pages(self, pages: int) -> None:
        """Begin with an empty KV cache of `pages` pages; alike on every rank, no step in flight."""
        self._table = VersionTable(pages)
        if pages == self.num_pages:
            return  # a page may hold anything until it is written
        self.num_pages = pages
        self._graphs = None
        self._pages = None  # a GPU holds the old pages or the new ones, not both
        if self.device.type == "cpu":
            self._pages = self._allocate(pages)
            return
        self._pages = self._allocate(pages + 1)  # one more, where the graphs' pad rows write
        if not self._config.enforce_eager and ranks_per_gpu() == 1:  # host staging is no graph
            self._graphs = DecodeGraphs(
                self.model, self._pages, self.device, self._config.max_num_seqs, self.max_model_len
            )

    def _allocate(self, pages: int) -> KeyValuePages:
        model = self.model_config
        return allocate_pages(
            model.num_layers, pages, self._key_heads, model.head_dim, self._dtype, self.device
        )

    def _warm_up(self, config: EngineConfig) -> None:
        limits = config.max_num_seqs, config.max_num_batched_tokens, self.max_model_len
        pages = self._allocate(pages_needed(*limits[1:]))
        warm_up(self.model, pages, self.device, *limits, LOGIT_ROWS)

    def close(self) -> None:
        """Let go of graphs and pages. Before the world closes: NCCL waits for its last graph."""
        self._graphs = None
        self._pages = None
        self.num_pages = 0
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def execute(self, plan: StepPlan, take_logits: TakeLogits) -> None:
        """Run one plan on this rank; wanted logits go to `take_logits`, in the rows' order.

        Raises IntegrityError when this rank's version table is not the sender's, or when a row
        may not read the pages it names.
        """
        self._table.apply(plan.events)
        if self._table.digest() != plan.table_digest:
            raise IntegrityError(
                f"step {plan.step}: the page table of rank {self._world.rank} has digest "
                f"{self._table.digest().hex()[:16]}, rank 0's is {plan.table_digest.hex()[:16]}"
            )
        self._table.check_readers(plan.rows)
        if not plan.rows:
            self._compare_tables()
            return
        if self._graphs is not None and self._graphs.takes(plan.rows):
            logits_RV = self._graphs.run(plan.rows)
            self._wait(plan.step)
            take_logits(0, logits_RV)
            return
        hidden_RH = self._run(plan)
        self._wait(plan.step)
        for first in range(0, len(hidden_RH), LOGIT_ROWS):
            take_logits(first, self.model.logits(hidden_RH[first : first + LOGIT_ROWS]))

    def _wait(self, step: int) -> None:
        """Bound the wait for a GPU whose collective may have lost a peer. Raises PeerLostError."""
        if self.device.type == "cpu" or self._world.size == 1:
            return
        if not wait_for_gpu(self.device, self._world.timeout):
            raise PeerLostError(
                f"step {step}: the GPU of rank {self._world.rank} did not finish in "
                f"{self._world.timeout:g} s: a peer is lost or hangs"
            )

    def _run(self, plan: StepPlan) -> torch.Tensor:
        """The model over a plan's rows; returns the residual rows whose logits are wanted."""
        ids: list[int] = []
        wanted: list[int] = []
        sequences = []
        for row in plan.rows:
            count = len(row.token_ids)
            sequences.append(PagedSequence(len(ids), count, row.start, row.pages))
            ids += row.token_ids
            wanted += range(len(ids) - row.logits, len(ids))
        assert self._pages is not None
        both = torch.tensor(ids + wanted, dtype=torch.int64)
        if self.device.type == "cuda":
            both = both.pin_memory().to(self.device, non_blocking=True)
        batch = make_batch(tuple(sequences), self.device)
        hidden_MH = self.model.hidden(both[: len(ids)], self._pages, batch)
        return hidden_MH[both[len(ids) :]]

    def _compare_tables(self) -> None:
        """The heartbeat: every rank shows the digest of its table as it lies in memory.

        Raises IntegrityError naming the rank and the page that differ, on every rank.
        """
        digests = self._world.gather_bytes(self._table.full_digest())
        if all(digest == digests[0] for digest in digests):
            return
        snapshots = self._world.gather_bytes(self._table.snapshot())
        for rank, snapshot in enumerate(snapshots):
            difference = first_difference(snapshots[0], snapshot)
            if difference is not None:
                raise IntegrityError(f"page tables of rank 0 and rank {rank} differ: {difference}")
        raise IntegrityError("the ranks' page tables differ in their history")

    def _agree_on_pages(self, config: EngineConfig) -> int:
        """Pages of the KV cache: as many as the rank with the least room has."""
        self._world.barrier()  # ranks that share memory look at it when all have loaded
        pages = config.kv_pages or self._pages_that_fit(config)
        everyone = self._world.gather_bytes(struct.pack("<Q", pages))
        return min(struct.unpack("<Q", data)[0] for data in everyone)

    def _pages_that_fit(self, config: EngineConfig) -> int:
        """As many as all sequences could use, but no more than a share of free memory holds."""
        model = self.model_config
        size = page_bytes(model.num_layers, self._key_heads, model.head_dim, self._dtype)
        useful = config.max_num_seqs * -(-self.max_model_len // PAGE_TOKENS)
        if self.device.type == "cuda":
            fitting = free_gpu_bytes(config.gpu_memory_utilization) // size
            if fitting < 1:
                raise ResourceError(
                    f"no GPU memory is left for a KV page of {size / 2**20:.1f} MiB: raise "
                    "--gpu-memory-utilization, lower --max-num-batched-tokens, or use more ranks"
                )
            return min(useful, fitting)
        fitting = int(_CACHE_SHARE * _available_memory()) // (size * self._world.size)
        return max(1, min(useful, fitting))

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self.model_config.dtype)


def _context(config: EngineConfig, model: ModelConfig) -> int:
    """The context length to serve. Raises UsageError past the model's own."""
    if config.max_model_len is None:
        return model.max_position
    if config.max_model_len > model.max_position:
        raise UsageError(
            f"max_model_len {config.max_model_len} is over the model's context of "
            f"{model.max_position}: lower it"
        )
    return config.max_model_len


def _check_kernels(config: ModelConfig, partition: Partition, device: str) -> None:
    """Golden vectors and bit classes of this machine. Raises DisagreementError or TpdetError."""
    found = golden_digest()
    if found != GOLDEN_SHA256:
        raise DisagreementError(
            f"golden vectors have digest {found[:16]}, the contract's is {GOLDEN_SHA256[:16]}: "
            "this build of torch breaks the arithmetic contract"
        )
    if device != "cpu":
        return
    row_widths = [config.num_heads * config.head_dim, config.intermediate_size]
    reduced = [config.hidden_size, *(width // partition.leaves for width in row_widths)]
    try:
        check_bit_classes(reduced, config.head_dim)
    except RuntimeError as error:
        raise TpdetError(str(error)) from error


def _threads_per_rank() -> int:
    """Worker threads: OMP_NUM_THREADS if set, else this rank's share of the processors."""
    named = os.environ.get("OMP_NUM_THREADS", "")
    if named.isdecimal() and int(named) > 0:
        return int(named)
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def _available_memory() -> int:
    """Bytes of memory that can be taken without swapping."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            name, value = line.split(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
