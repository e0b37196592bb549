"""One rank's step: check the plan, update the tables, run the model over the plan's rows.

Shape suffixes: M rows of the step, R rows whose logits are wanted, V vocabulary.
"""

import os
import struct
from collections.abc import Callable

import torch

from tpdet.cache.kv import allocate_pages, page_bytes
from tpdet.cache.versions import VersionTable, first_difference
from tpdet.comm.agreement import agree, collect_facts
from tpdet.comm.world import World
from tpdet.config import EngineConfig
from tpdet.errors import DisagreementError, IntegrityError, TpdetError, UsageError
from tpdet.kernels.cpu import threads
from tpdet.kernels.cpu.admission import check_bit_classes
from tpdet.kernels.golden import golden_digest
from tpdet.kernels.order import GOLDEN_SHA256, PAGE_TOKENS, Contract
from tpdet.kernels.paged_batch import PagedSequence, make_batch
from tpdet.layers.partition import Partition, make_partition
from tpdet.model_config import ModelConfig, load_model_config
from tpdet.models.decoder import Decoder
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

    def __init__(self, config: EngineConfig, world: World) -> None:
        """Load the model. Every refusal (flags, checkpoint, ranks that differ) happens here."""
        self._world = world
        if config.device == "cuda":
            raise UsageError("device cuda is not supported yet: use --device cpu")
        directory = resolve_model(config.model, config.revision)
        self.model_config = load_model_config(directory, config.dtype)
        self.max_model_len = _context(config, self.model_config)
        partition = make_partition(self.model_config, world, config.fold_order, config.leaves)
        self.contract = Contract(
            "cpu", self.model_config.dtype, partition.leaves, config.fold_order
        ).identifier
        threads.configure(_threads_per_rank())
        _check_kernels(self.model_config, partition)
        settings = config.model_dump(exclude={*_LOCAL_FACTS})
        agree(world, collect_facts(settings | {"contract": self.contract}))
        world.set_timeout(max(LOAD_TIMEOUT, config.step_timeout))
        source = open_weights(
            directory, self.model_config, config.load_format, config.seed, world.rank == 0
        )
        self.model = Decoder(source, partition, self.max_model_len)
        tied = self.model_config.tie_word_embeddings
        self.model_digest = model_digest(
            self.model_config,
            merge_digests(world, source.finish(_TIED if tied else None)),
            (self.model.cos, self.model.sin),
        )
        self._key_heads = len(partition.key_heads)
        pages = self._agree_on_pages(config)
        world.set_timeout(config.step_timeout)
        self.reset_pages(pages)

    @property
    def system_fingerprint(self) -> str:
        """Names contract, model and architecture: what may change bits."""
        return system_fingerprint(self.contract, self.model_digest, "cpu")

    def reset_pages(self, pages: int) -> None:
        """Begin with an empty KV cache of `pages` pages; alike on every rank, no step in flight."""
        self.num_pages = pages
        self._pages = allocate_pages(
            self.model_config.num_layers,
            pages,
            self._key_heads,
            self.model_config.head_dim,
            self._dtype,
        )
        self._table = VersionTable(pages)

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
        hidden_RH = self._run(plan)
        for first in range(0, len(hidden_RH), LOGIT_ROWS):
            take_logits(first, self.model.logits(hidden_RH[first : first + LOGIT_ROWS]))

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
        hidden_MH = self.model.hidden(torch.tensor(ids), self._pages, make_batch(tuple(sequences)))
        return hidden_MH[torch.tensor(wanted, dtype=torch.int64)]

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
        """Pages of the KV cache: rank 0 decides, everyone takes its number."""
        pages = config.kv_pages or self._pages_that_fit(config)
        return struct.unpack("<Q", self._world.broadcast_bytes(struct.pack("<Q", pages)))[0]

    def _pages_that_fit(self, config: EngineConfig) -> int:
        """As many as all sequences could use, but no more than a share of free memory holds."""
        model = self.model_config
        size = page_bytes(model.num_layers, self._key_heads, model.head_dim, self._dtype)
        useful = config.max_num_seqs * -(-self.max_model_len // PAGE_TOKENS)
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


def _check_kernels(config: ModelConfig, partition: Partition) -> None:
    """Known answers and bit classes of this machine. Raises DisagreementError or TpdetError."""
    found = golden_digest()
    if found != GOLDEN_SHA256:
        raise DisagreementError(
            f"golden vectors have digest {found[:16]}, the contract's is {GOLDEN_SHA256[:16]}: "
            "this build of torch breaks the arithmetic contract"
        )
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
