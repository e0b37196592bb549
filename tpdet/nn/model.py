"""A trainer's model: the decoder of the server, whose weights are a module's parameters.

    model = tpdet.nn.load("Qwen/Qwen3-0.6B")
    scores = model.log_prob(ids, lengths)          # the bits of the server's log-probabilities
    (-(scores * advantages).mean()).backward()

Parameters have transformers' names and shapes. Each forward pass lays them out for the kernels, so
no answer is of weights that were changed since, in whatever way they were. Under `torch.no_grad`
the kernels run as in a server; else their operators do, with the same bits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from tpdet.cache.kv import KeyValuePages, allocate_pages
from tpdet.checkpoint.model_config.stored_form import read_stored_form
from tpdet.checkpoint.pieces import Pieces, TensorRead
from tpdet.checkpoint.source import WeightSource
from tpdet.comm.exchange.fold import GatherExchange
from tpdet.errors import RequestError
from tpdet.layers.arithmetic import Arithmetic
from tpdet.layers.partition import Partition
from tpdet.models.decoder import Decoder
from tpdet.nn.operators.attention import packed_batch, page_count
from tpdet.nn.operators.vocabulary import log_probabilities
from tpdet.nn.parameters import (
    EMBEDDING,
    ParameterPart,
    ParameterSource,
    decoder_reads,
    parameter_parts,
)
from tpdet.nn.recorded import RecordedWorld, Recording, Repeated, Shared

_ROWS_AT_ONCE = 1024  # rows whose logits are in memory, unless autograd keeps them
_NEVER = 1 << 62  # rows from which the two-shot is taken, which has no gradient
Packed = Tensor | Sequence[int]
"""Ids of sequences, one after the other, or how many each has."""


class CausalLM(Module):
    """A decoder over a world of ranks: each has all parameters, and computes its share by them."""

    family: ClassVar[str] = ""

    def __init__(
        self, directory: Path, partition: Partition, device: torch.device, contract_id: str
    ) -> None:
        """Parameters that `read` fills, fused as `directory` says; contract_id: a server's."""
        super().__init__()
        world = RecordedWorld(partition.world)
        exchange = GatherExchange(partition.plan, world, two_shot_rows=_NEVER)
        self._partition = replace(partition, world=world, arithmetic=Arithmetic(exchange))
        self._device = device
        self.config, self.directory, self.contract_id = partition.config, directory, contract_id
        self._reads = decoder_reads(self.config)
        fused = read_stored_form(directory).fused
        self._parts = parameter_parts(self.config, self._reads, fused)
        for read in self._reads:
            self._make(self._parts[read.name], read.pieces.exact)
        if self.config.tie_word_embeddings:
            self.lm_head = Module()
            self.lm_head.weight = self.get_parameter(EMBEDDING)

    def _make(self, part: ParameterPart, exact: bool) -> None:
        """A parameter, in modules by its name; exact: fp32 numbers without a gradient."""
        *path, last = part.name.split(".")
        module: Module = self
        for name in path:
            if name not in dict(module.named_children()):
                module.add_module(name, Module())
            module = module.get_submodule(name)
        if hasattr(module, last):
            return
        dtype = torch.float32 if exact else getattr(torch, self.config.dtype)
        values = torch.empty(part.shape, dtype=dtype, device=self._device)
        if exact:
            module.register_buffer(last, values)
        else:
            module.register_parameter(last, Parameter(values))

    def read(self, source: WeightSource) -> None:
        """Fill the parameters from a checkpoint. Raises CheckpointError."""
        tensors = self.state_dict()
        whole = [
            TensorRead(read.name, read.shape, Pieces.whole(exact=read.pieces.exact))
            for read in self._reads
        ]
        source.read_into(whole, [self._stored(read.name, tensors) for read in whole])

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and values as a checkpoint has them, one of each expert, in the model's dtype."""
        tensors, dtype = self.state_dict(), getattr(torch, self.config.dtype)
        for read in self._reads:
            values = self._stored(read.name, tensors)
            yield read.name, values.to(values.dtype if read.pieces.exact else dtype).contiguous()

    def forward(self, ids: Packed, lengths: Packed) -> Tensor:
        """Logits fp32 [M, V] of the M ids of packed sequences; arguments as of `log_prob`."""
        ids_M, counts = self._checked(ids, lengths)
        return self._over_rows(ids_M, counts, range(len(ids_M)), lambda logits, rows: logits)

    def log_prob(self, ids: Packed, lengths: Packed, temperature: float = 1.0) -> Tensor:
        """Log-probabilities fp32 [M - B] of each token of B packed sequences but their first.

        ids int64 [M]: the sequences, one after the other; lengths [B]: how many ids each has.
        temperature: that of sampling where nothing else was set. The bits are a server's for these
        weights, whatever stands beside a sequence; a row that is not finite gives NaN. They have
        gradients unless under `torch.no_grad`. Raises RequestError.
        """
        ids_M, counts = self._checked(ids, lengths)
        if not 0.0 < temperature < float("inf"):
            raise RequestError(f"temperature {temperature!r}: it must be over 0", "temperature")
        last = {end - 1 for end in accumulate(counts)}
        rows = [row for row in range(len(ids_M)) if row not in last]

        def score(logits: Tensor, scored: Tensor) -> Tensor:
            return log_probabilities(logits, ids_M[scored + 1], temperature)

        return self._over_rows(ids_M, counts, rows, score)

    def _checked(self, ids: Packed, lengths: Packed) -> tuple[Tensor, list[int]]:
        """Ids on the device and lengths as numbers. Raises RequestError."""
        ids_M, counts = torch.as_tensor(ids), torch.as_tensor(lengths).tolist()
        if ids_M.dim() != 1 or ids_M.is_floating_point() or ids_M.dtype == torch.bool:
            raise RequestError(f"ids {tuple(ids_M.shape)} {ids_M.dtype}: use integers [M]", "ids")
        if not counts or min(counts) < 1 or sum(counts) != len(ids_M):
            raise RequestError(
                f"lengths {counts!s:.60}: they must be positive and add up to the {len(ids_M)} ids",
                "lengths",
            )
        if max(counts) > self.config.max_position:
            raise RequestError(
                f"a sequence of {max(counts)} ids is over the model's context of "
                f"{self.config.max_position}: cut it",
                "lengths",
            )
        low, high = int(ids_M.min()), int(ids_M.max())
        if low < 0 or high >= self.config.vocab_size:
            raise RequestError(
                f"id {low if low < 0 else high} is none of the vocabulary's "
                f"{self.config.vocab_size}",
                "ids",
            )
        return ids_M.to(self._device, torch.int64), counts

    def _over_rows(
        self,
        ids_M: Tensor,
        counts: list[int],
        rows: Sequence[int],
        use: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """What `use` makes of logits [R, V] and the numbers of their rows, part by part."""
        if not rows:
            return torch.zeros(0, device=self._device)
        learns = torch.is_grad_enabled() and any(each.requires_grad for each in self.parameters())
        recording = Recording(self.config.num_layers) if learns else None
        with torch.no_grad() if recording is None else recording.running():
            decoder = self._decoder(max(counts), learns)
            pages = self._pages(counts) if recording is None else recording.pages
            hidden_MH = decoder.hidden(ids_M, pages, packed_batch(counts, self._device))
            results = []
            for part in torch.tensor(rows, device=self._device).split(_ROWS_AT_ONCE):
                local = decoder.local_logits(hidden_MH.index_select(0, part))
                results.append(use(decoder.whole_logits(local), part))
            result: Tensor = Repeated.apply(torch.cat(results), self._partition.world.size)
        return result

    def _decoder(self, positions: int, learns: bool) -> Decoder:
        """The decoder of the parameters' present values; learns: whose weights have gradients."""
        tensors, world = self.state_dict(keep_vars=True), self._partition.world
        if learns and world.size > 1:
            trained = [name for name, values in tensors.items() if values.requires_grad]
            shared = Shared.apply(world, *(tensors[name] for name in trained))
            tensors |= zip(trained, shared, strict=True)
        dtype: torch.dtype = getattr(torch, self.config.dtype)
        source = ParameterSource(dtype, self._device, self._parts, tensors)
        return Decoder(source, self._partition, positions)

    def _pages(self, counts: list[int]) -> KeyValuePages:
        config, pages = self.config, sum(map(page_count, counts))
        shape = len(self._partition.key_heads), config.head_dim
        dtype: torch.dtype = getattr(torch, config.dtype)
        return allocate_pages(config.num_layers, pages, *shape, dtype, self._device)

    def _stored(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        part = self._parts[name]
        return part.of(tensors[part.name])


class Llama(CausalLM):
    """Models of `LlamaForCausalLM`."""

    family = "llama"


class Qwen3(CausalLM):
    """Models of `Qwen3ForCausalLM`."""

    family = "qwen3"


class Qwen3Moe(CausalLM):
    """Models of `Qwen3MoeForCausalLM`."""

    family = "qwen3_moe"
