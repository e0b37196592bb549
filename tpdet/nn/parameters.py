"""The parameters of a decoder by transformers' names and shapes, and what layers read of them.

Layers read tensors by the names of checkpoints, one of each expert. transformers keeps the experts
of a layer in two parameters, and a family that fuses projections keeps those in one.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpdet.checkpoint.model_config import FAMILIES, ModelConfig
from tpdet.checkpoint.model_config.stored_form import FusedParts
from tpdet.checkpoint.pieces import TensorRead
from tpdet.checkpoint.source import UnreadWeights
from tpdet.comm.world.world import SoloWorld
from tpdet.layers.partition import make_partition
from tpdet.models.decoder import Decoder

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_OF_EXPERT = re.compile(r"(?P<block>.*\.experts)\.(?P<expert>\d+)\.(?P<part>\w+)\.(?P<kind>\w+)")


class ParameterPart(NamedTuple):
    """The part of a parameter that a tensor of a checkpoint is: an index, perhaps transposed."""

    name: str
    shape: tuple[int, ...]
    where: tuple[Any, ...] = ()
    transposed: bool = False

    def of(self, parameter: Tensor) -> Tensor:
        """A view in the shape of the checkpoint's tensor."""
        part = parameter[self.where] if self.where else parameter
        return part.t() if self.transposed else part


class ListedReads(UnreadWeights):
    """Weights that have no memory: it notes what layers read."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype, torch.device("meta"))

    def read_into(self, reads: Sequence[TensorRead], targets: Sequence[Tensor]) -> None:
        """Note the reads."""
        self.reads += reads


class _PieceCopy(NamedTuple):
    """A piece of a parameter, and the shape and strides that it has in laid out memory."""

    parameter: int
    part: ParameterPart
    read: TensorRead
    layout: tuple[tuple[int, ...], tuple[int, ...], int]

    def source(self, parameter: Tensor) -> Tensor:
        """What is copied."""
        return _source(self.part, self.read, parameter)

    def target(self, memory: Tensor) -> Tensor:
        """Where they lie in it."""
        shape, strides, offset = self.layout
        return memory.as_strided(shape, strides, memory.storage_offset() + offset)


def _source(part: ParameterPart, read: TensorRead, parameter: Tensor) -> Tensor:
    """A rank's pieces of a tensor, which are neighbours: a view."""
    pieces, kept = read.each(), read.pieces.kept
    first, last = pieces[0].first, pieces[-1].last
    if kept is not None:
        first, last = first + kept.start, first + kept.stop
    return part.of(parameter).narrow(read.pieces.dim, first, last - first)


class _LaidOut(torch.autograd.Function):
    """Copies of pieces into memory, which has the parameters' gradients from then on."""

    @staticmethod
    def forward(
        ctx: Any, memory: Tensor, copies: Sequence[_PieceCopy], *parameters: Tensor
    ) -> Tensor:
        for copy in copies:
            target = copy.target(memory)
            target.copy_(copy.source(parameters[copy.parameter]).reshape(target.shape))
        ctx.copies = copies
        ctx.save_for_backward(*parameters)
        ctx.mark_dirty(memory)
        return memory

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        gradient, parameters = gradients[0].contiguous(), ctx.saved_tensors
        results = [torch.zeros_like(parameter) for parameter in parameters]
        for copy in ctx.copies:
            source = copy.source(results[copy.parameter])
            source.copy_(copy.target(gradient).reshape(source.shape))
        return None, None, *results


class _Written(torch.autograd.Function):
    """Memory that is in a graph from the start, so that its parts can be written to in turn."""

    @staticmethod
    def forward(ctx: Any, graph: Tensor, shape: tuple[int, ...]) -> Tensor:
        return graph.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


class ParameterSource(UnreadWeights):
    """A decoder's weights out of parameters, through which gradients go, each piece once."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        parts: Mapping[str, ParameterPart],
        parameters: Mapping[str, Tensor],
    ) -> None:
        """parts: of the parameters, by the names of the checkpoint."""
        super().__init__(dtype, device)
        self._parts, self._parameters = parts, parameters
        self._rooms: dict[int, Tensor] = {}

    def memory_for(self, held: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """New memory, whose parts will be read into."""
        room = super().memory_for(held, shape)
        if torch.is_grad_enabled():
            room = _Written.apply(room.new_zeros(0, requires_grad=True), room.shape)
        self._rooms[room.untyped_storage().data_ptr()] = room
        return room

    def read_all(self, reads: Sequence[TensorRead]) -> list[Tensor]:
        """This rank's pieces of tensors, without a copy where the dtype is the model's."""
        return [
            _source(self._parts[read.name], read, self._parameters[self._parts[read.name].name]).to(
                self.dtype_of(read.pieces)
            )
            for read in reads
        ]

    def read_into(self, reads: Sequence[TensorRead], targets: Sequence[Tensor]) -> None:
        """Copy this rank's pieces; targets are contiguous memory, or parts of `memory_for`'s."""
        copies: dict[int, list[tuple[TensorRead, Tensor]]] = {}
        for read, target in zip(reads, targets, strict=True):
            if target.numel() == 0:
                continue  # of a rank without heads
            copies.setdefault(target.untyped_storage().data_ptr(), []).append((read, target))
        for storage, parts in copies.items():
            self._fill(self._rooms.get(storage, parts[0][1]), parts)

    def _fill(self, memory: Tensor, parts: Sequence[tuple[TensorRead, Tensor]]) -> None:
        names = dict.fromkeys(self._parts[read.name].name for read, _ in parts)
        numbers = {name: number for number, name in enumerate(names)}
        copies = []
        for read, target in parts:
            part = self._parts[read.name]
            offset = int(target.storage_offset() - memory.storage_offset())
            layout = tuple(target.shape), target.stride(), offset
            copies.append(_PieceCopy(numbers[part.name], part, read, layout))
        _LaidOut.apply(memory, copies, *(self._parameters[name] for name in names))


def decoder_reads(config: ModelConfig) -> list[TensorRead]:
    """What layers read of a whole model, in their order."""
    source = ListedReads(getattr(torch, config.dtype))
    Decoder(source, make_partition(config, SoloWorld(), "tree", None), positions=1)
    return [read for read in source.reads if isinstance(read, TensorRead)]


def parameter_parts(
    config: ModelConfig, reads: Sequence[TensorRead], fused: FusedParts
) -> dict[str, ParameterPart]:
    """Where transformers keeps each tensor of the checkpoint. fused: as of `StoredForm`."""
    fused_rows = {
        part: (whole, first, tensor.group_rows)
        for whole, tensor in fused.items()
        for part, first in zip(
            [part for part, _ in tensor.parts],
            _starts([rows for _, rows in tensor.parts]),
            strict=True,
        )
    }
    return {read.name: _part(config, read, fused_rows) for read in reads}


def _part(
    config: ModelConfig, read: TensorRead, fused: Mapping[str, tuple[str, int, int]]
) -> ParameterPart:
    name, mixture = read.name, config.mixture
    if mixture is not None:
        name = name.replace(f".{mixture.block}.", ".mlp.")
    expert = _OF_EXPERT.fullmatch(name)
    if expert is not None:
        return _part_of_expert(config, expert, read.shape)
    for ending, (whole, first, total) in fused.items():
        if name.endswith(f".{ending}"):
            rows = slice(first, first + read.shape[0])
            return ParameterPart(
                name.removesuffix(ending) + whole, (total, *read.shape[1:]), (rows,)
            )
    return ParameterPart(name, read.shape)


def _part_of_expert(
    config: ModelConfig, name: re.Match[str], shape: tuple[int, ...]
) -> ParameterPart:
    """Gates and ups one after the other; in turn and transposed in families that stack experts."""
    mixture = config.mixture
    assert mixture is not None  # the name says so
    kind, expert = mixture.projections.index(name["part"]), int(name["expert"])
    joined, (outputs, *inputs) = kind < 2, shape
    whole = f"{name['block']}.{'gate_up_proj' if joined else 'down_proj'}"
    whole += "_bias" if name["kind"] == "bias" else ""
    total, experts = 2 * outputs if joined else outputs, mixture.routing.experts
    stacked = FAMILIES[config.architecture].stacked
    if stacked:
        own = slice(kind, None, 2) if joined else slice(None)
    else:
        own = slice(kind * outputs, (kind + 1) * outputs) if joined else slice(None)
    if stacked and inputs:
        return ParameterPart(whole, (experts, *inputs, total), (expert, slice(None), own), True)
    return ParameterPart(whole, (experts, total, *inputs), (expert, own))


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes))]
