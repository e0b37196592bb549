"""The decoder that all families share: embedding, layers of the family, norm and output head.

Shape suffixes: M rows of the step, H hidden, V vocabulary.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from copy import copy
from functools import partial
from typing import NamedTuple

import torch

from tpdet.cache.kv import KeyValuePages
from tpdet.checkpoint.source import WeightSource
from tpdet.comm.exchange.fold import RankExchange
from tpdet.kernels import ops
from tpdet.kernels.exact.rotary_tables import identity_table, rotary_table
from tpdet.kernels.inputs.paged_batch import PagedBatch
from tpdet.layers.arithmetic import Arithmetic
from tpdet.layers.micro_batch import MicroBatch, Projected
from tpdet.layers.norm import NormLayer
from tpdet.layers.partition import Partition
from tpdet.layers.pooling_head import PoolingHead
from tpdet.layers.vocabulary import VocabularyTable
from tpdet.models.alike_layers import AlikeLayers, LayerCall
from tpdet.models.layer import DecoderLayer


class Unfinished(NamedTuple):
    """What `Decoder.finish` needs of rows: the fp32 stream, and what the last layer projected.

    Of the stream each of several ranks has the rows that it owns.
    """

    hidden_MH: torch.Tensor
    projected: Projected

    @classmethod
    def joined(cls, parts: Sequence["Unfinished"]) -> "Unfinished":
        """The rows of one batch, or of several that follow each other."""
        if len(parts) == 1:
            return parts[0]
        hidden, projected = zip(*parts, strict=True)
        return cls(torch.cat(hidden), tuple(map(torch.cat, zip(*projected, strict=True))))


class Decoder:
    """Token ids to logits on this rank's share of the weights.

    `gives_logits`: of tokens; else its logits are a score head's labels, or rows.
    """

    def __init__(self, source: WeightSource, partition: Partition, positions: int) -> None:
        """Read every weight; `positions` is how far the rotary table reaches."""
        config = partition.config
        self._keeps_routes, self.gives_logits = False, config.head == "tokens"
        self._arithmetic, self._alone = partition.arithmetic, partition.world.size == 1
        self._kinds = [config.kind_of(i) for i in range(config.num_layers)]
        # Others exchange in the midst of attention, or between the products of experts.
        self._overlaps = config.qk_norm_over == "head" and partition.experts is None
        self.embedding = VocabularyTable(source, partition, "model.embed_tokens")
        self.layers = [DecoderLayer(source, partition, i) for i in range(config.num_layers)]
        self._norm = NormLayer(source, config, "model.norm")
        self._head: VocabularyTable | PoolingHead = self.embedding
        if config.head != "tokens":
            self._head = PoolingHead(source, partition)
        elif not config.tie_word_embeddings:
            self._head = VocabularyTable(source, partition, "lm_head")
        self._embedding_scale, self._logit_scale = config.embedding_scale, config.logit_scale
        self._logit_cap = config.logit_cap
        if config.head != "tokens":  # neither is part of a row or of a label
            self._logit_scale, self._logit_cap = 1.0, 0.0
        device, half = self._norm.norm.weight.device, config.head_dim // 2
        scale = config.query_key_scale
        self.tables = {
            spec: identity_table(positions, half, device, scale)
            if spec is None
            else rotary_table(spec, positions, device, half, scale)
            for spec in config.rotaries
        }
        self._tables = [self.tables[config.rotary_of(i)] for i in range(config.num_layers)]

    def load(self, source: WeightSource) -> None:
        """Read every weight again, each into the memory it has: CUDA graphs stay valid.

        The checkpoint's configuration must be the first one's. No step may be pending, here or
        on a peer. Raises as `WeightSource.read`; the model is then neither the old nor the new.
        """
        self.embedding.load(source)
        for layer in self.layers:
            layer.load(source)
        self._norm.load(source)
        if self._head is not self.embedding:
            self._head.load(source)

    def hidden(
        self,
        ids_M: torch.Tensor,
        pages: KeyValuePages,
        *batches: PagedBatch,
        alike: AlikeLayers | None = None,
    ) -> torch.Tensor:
        """Run the layers over a step's rows, storing their keys and values; -> [M, H], normed.

        The rows of several batches follow each other; the exchanges of one overlap the products of
        the others. alike: of these pages, where a graph is captured of a single batch.
        """
        parts = self._parts(ids_M, batches)
        with self._overlapping(parts):
            self._run(parts, self._calls(pages), alike)
        return _settled(parts)

    def begin(
        self,
        ids_M: torch.Tensor,
        pages: KeyValuePages,
        *batches: PagedBatch,
        alike: AlikeLayers | None = None,
    ) -> list[Unfinished]:
        """`hidden` up to the last layer's attention, of each batch: all keys and values are stored.

        What is left of that layer is wanted of the rows whose logits are, so `finish` takes `some`
        of them; only where `finishes_some`. alike: of all layers but the last.
        """
        *calls, last = self._calls(pages)
        parts = self._parts(ids_M, batches)
        with self._overlapping(parts):
            self._run(parts, calls, alike)
            projected = []
            for rows in parts:
                rows.settle()
                projected.append(last.layer.project(rows, last.rotary, last.pages))
        hidden = (rows.hidden_MH for rows in parts)
        return list(map(Unfinished, hidden, projected))

    def some(
        self, unfinished: Unfinished, wanted_R: torch.Tensor, parts: tuple[int, ...]
    ) -> Unfinished:
        """Some rows of a step, by their numbers int64 [R], with the stream on every rank.

        parts: the rows of each batch of `begin`. Collective.
        """
        projected = tuple(part.index_select(0, wanted_R) for part in unfinished.projected)
        hidden_RH = self.exchange.stream_rows(unfinished.hidden_MH, wanted_R, parts)
        return Unfinished(hidden_RH, projected)

    def finish(
        self, unfinished: Sequence[Unfinished], pages: KeyValuePages, *batches: PagedBatch
    ) -> torch.Tensor:
        """The rest of the last layer -> [R, H], normed.

        batches: of `some` rows, which attend; or those of `begin`, with all that it gave.
        """
        if not any(len(hidden_RH) for hidden_RH, _ in unfinished):
            return unfinished[0].hidden_MH.to(self._norm.norm.dtype)
        overlapped, layer = len(batches) > 1, self.layers[-1]
        parts = [
            MicroBatch(batch, hidden_RH, hidden_RH[:0], overlapped)  # attention reads no x
            for batch, (hidden_RH, _) in zip(batches, unfinished, strict=True)
        ]
        with self._overlapping(parts):
            for rows, (_, projected) in zip(parts, unfinished, strict=True):
                layer.attend(projected, rows, pages.layers[layer.index])
            for rows in parts:
                rows.settle()
                layer.feed(rows, self._norm.norm)
        return _settled(parts)

    @property
    def finishes_some(self) -> bool:
        """Whether `begin` and `finish` do what `hidden` does for these rows; routes: all rows'."""
        return not self._keeps_routes

    def _parts(self, ids_M: torch.Tensor, batches: Sequence[PagedBatch]) -> list[MicroBatch]:
        ids = ids_M.split([batch.row_count for batch in batches])
        overlapped = len(batches) > 1
        return [
            self._embedded(part_M, batch, overlapped)
            for part_M, batch in zip(ids, batches, strict=True)
        ]

    def _overlapping(self, parts: Sequence[MicroBatch]) -> AbstractContextManager[None]:
        """While inside, products leave room for the exchanges of other parts, if there are any."""
        left = self._multiprocessors if len(parts) > 1 else 0
        return ops.leaving_multiprocessors(left, parts[0].hidden_MH.device)

    def _run(
        self, parts: Sequence[MicroBatch], calls: Sequence[LayerCall], alike: AlikeLayers | None
    ) -> None:
        if alike is not None:
            (only,) = parts
            alike.launch(only, partial(_run_layer, only))
            return
        for call in calls:
            call.layer.forward(parts, call.following, call.rotary, call.pages)

    def _embedded(self, ids_M: torch.Tensor, batch: PagedBatch, overlapped: bool) -> MicroBatch:
        """A batch's rows as the first layer reads them."""
        hidden_MH = self.embedding.embed(ids_M)
        if self._embedding_scale != 1.0:
            hidden_MH = hidden_MH * self._embedding_scale
        first_norm = self.layers[0].norms.before_attention
        x_MH = (
            hidden_MH.to(self._norm.norm.dtype)
            if first_norm is None
            else ops.rms_norm(hidden_MH, first_norm)
        )
        return MicroBatch(batch, hidden_MH, x_MH, overlapped)

    def _calls(self, pages: KeyValuePages) -> list[LayerCall]:
        """Each layer with the norm that follows it, which its last exchange applies as well."""
        following = [*(layer.norms.before_attention for layer in self.layers[1:]), self._norm.norm]
        return [
            LayerCall(layer, norm, self._tables[layer.index], pages.layers[layer.index])
            for layer, norm in zip(self.layers, following, strict=True)
        ]

    def alike(self, pages: KeyValuePages, but_last: bool = False) -> AlikeLayers | None:
        """What captures of steps over these pages need not run anew; None with several ranks.

        but_last: for `begin`, which leaves the last layer out. Void once the arithmetic or the
        kept routes change. With several ranks, each exchange has its turn, which is the host's to
        count.
        """
        if not self._alone or not ops.can_tape(pages.device):
            return None
        calls = self._calls(pages)
        return AlikeLayers(calls[:-1] if but_last else calls)

    @property
    def exchange(self) -> RankExchange:
        """The exchange of the arithmetic in use."""
        return self._arithmetic.exchange

    def shallow(self) -> "Decoder":
        """The same weights with one layer of each kind: it launches every kernel that this does.

        Its last layer is of the model's last one's kind. Its answers mean nothing: it is for
        warm-up and capture.
        """
        other, kinds = copy(self), self._kinds
        ordered = [*sorted(set(kinds[:-1]) - {kinds[-1]}), kinds[-1]]
        other.layers = [self.layers[kinds.index(kind)] for kind in ordered]
        return other

    def keep_routes(self, routes: torch.Tensor | None) -> None:
        """[layers with experts, slots, k]: where rows' experts are kept; None: by another rank."""
        self._keeps_routes = True
        with_experts = [layer for layer in self.layers if self._kinds[layer.index][1]]
        for number, layer in enumerate(with_experts):
            layer.keep_routes(None if routes is None else routes[number])

    def adopt(self, arithmetic: Arithmetic) -> None:
        """Compute by this from now on, between two steps; graphs of the model are then void."""
        self._arithmetic = arithmetic
        self.embedding.adopt(arithmetic)
        self._head.adopt(arithmetic)
        for layer in self.layers:
            layer.adopt(arithmetic)

    @property
    def attends_in_fixed_shapes(self) -> bool:
        """Whether a graph may hold steps with prompt rows."""
        return self._arithmetic.fixed_shapes

    @property
    def overlaps_exchanges(self) -> bool:
        """Whether exchanges between ranks can overlap products."""
        return self._multiprocessors > 0

    @property
    def _multiprocessors(self) -> int:
        return self.exchange.overlap_programs if self._overlaps else 0

    def local_logits(self, x_MH: torch.Tensor) -> torch.Tensor:
        """Normed rows [M, H] -> fp32 logits of this rank's part of the vocabulary [M, V']."""
        local_MV = self._head.local_logits(x_MH)
        if self._logit_scale != 1.0:
            local_MV = local_MV * self._logit_scale
        return ops.soft_cap(local_MV, self._logit_cap) if self._logit_cap else local_MV

    def whole_logits(self, local_MV: torch.Tensor) -> torch.Tensor:
        """Every rank's local logits -> [M, V], equal on every rank."""
        return self._head.whole_logits(local_MV)


def _settled(parts: Sequence[MicroBatch]) -> torch.Tensor:
    """The normed rows of all parts, [M, H], once their exchanges have ended."""
    for rows in parts:
        rows.settle()
    return torch.cat([rows.x_MH for rows in parts]) if len(parts) > 1 else parts[0].x_MH


def _run_layer(rows: MicroBatch, call: LayerCall) -> None:
    """Launch a layer over rows; its results are the rows' then."""
    call.layer.forward([rows], call.following, call.rotary, call.pages)
    rows.settle()
