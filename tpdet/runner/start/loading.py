"""A model's weights on this rank: loaded at start, and again, in place, by a reload.

A reload reads everything twice. First all ranks check the whole checkpoint and exchange what they
found. If one refuses, no rank loads it and the old weights go on serving. Only then are weights
overwritten, and what is read the second time must have the digests of the first.
"""

import json
import logging
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import fields
from itertools import chain
from pathlib import Path

import blake3
import msgspec
import torch

from tpdet.checkpoint.checkpoint import check_sizes
from tpdet.checkpoint.digests import Digests
from tpdet.checkpoint.gguf.header import is_gguf
from tpdet.checkpoint.gguf.tokenizer import read_gguf_tokenizer
from tpdet.checkpoint.model_config import ModelConfig, load_model_config
from tpdet.checkpoint.model_config.fit import check_experts, check_widths, context_length
from tpdet.checkpoint.resolve import resolve_model
from tpdet.checkpoint.sample import sample_checkpoint
from tpdet.checkpoint.source import UnreadWeights, WeightRead, WeightSource, open_weights
from tpdet.comm.agreement import agree
from tpdet.comm.weight_digests import merge_digests
from tpdet.comm.world.world import World, rank_on_node
from tpdet.config import EngineConfig
from tpdet.errors import (
    CheckpointError,
    IntegrityError,
    PeerLostError,
    ReloadError,
    TpdetError,
    UsageError,
)
from tpdet.launch.ranks.pinned import threads_per_rank
from tpdet.layers.partition import Partition
from tpdet.models.decoder import Decoder
from tpdet.models.fingerprint import model_digest, table_digest
from tpdet.models.products import sized_tensors

_TIED = ("lm_head.weight", "model.embed_tokens.weight")
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip

MOST_THREADS = 8
"""Threads that read weights on a rank: as many bring a GPU's link about what it takes."""

Tick = Callable[[], None]

_log = logging.getLogger("tpdet.engine")
_refusals = msgspec.msgpack.Decoder(tuple[int, str, str] | None)


class Loader:
    """Reads one model into one rank. Its methods are collective: all ranks call them together."""

    def __init__(
        self, config: EngineConfig, model: ModelConfig, world: World, device: torch.device
    ) -> None:
        self._config, self._model, self._world, self._device = config, model, world, device
        self.reads: tuple[WeightRead, ...] = ()
        self._tokenizer: dict[str, str] = {}

    def begin(
        self, directory: Path, partition: Partition, positions: int, beside: bool
    ) -> "Loading":
        """The model in memory, whose weights `Loading.finish` waits for; `positions` as `Decoder`.

        beside: they are read in a thread, while this one does something else; else they are read
        when this returns. Raises as `WeightSource.read`, and DisagreementError.
        """
        _log.info("loading weights of %s", self._config.model)
        source = self.open_source(directory, self._device)
        if self._world.size > 1:
            agree(self._world, sample_checkpoint(directory, source.files))
        self._tokenizer = self._served_tokenizer(directory)
        if not beside:
            return Loading(Decoder(source, partition, positions), source, self._agree)
        unread = UnreadWeights(getattr(torch, self._model.dtype), self._device)
        loading = Loading(Decoder(unread, partition, positions), source, self._agree)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # parts of joined weights, which pages are to get
        loading.begin(self._device)
        return loading

    def _agree(self, decoder: Decoder, source: WeightSource) -> str:
        """The digest of weights that were read, which all ranks agree on. Collective."""
        digests = self._finish(source)
        self._settle()
        digest = self._digest(merge_digests(self._world, digests))
        tables = table_digest(tuple(chain.from_iterable(decoder.tables.values())))
        agree(self._world, {"model digest": digest, "rotary tables": tables})
        self.reads = tuple(source.reads)
        return digest

    def _settle(self) -> None:
        """Return when all ranks have their weights in place: peers read parts of a vocabulary."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._world.barrier()

    def reload(self, decoder: Decoder, name: str, tick: Tick) -> str:
        """Overwrite the weights of `decoder` with those of model `name`; the model's new digest.

        `tick` is called after each tensor. Raises ReloadError, on every rank, when any refuses
        the checkpoint: nothing has changed then. Raises IntegrityError when the checkpoint was
        changed while it was read: the weights are neither the old nor the new then.
        """
        directory, checked, weights = self._check_together(name, tick)
        try:
            source = self.open_source(directory, torch.device("cpu"), tick)
            decoder.load(source)
            loaded = self._finish(source)
        except PeerLostError:
            raise
        except Exception as error:
            raise IntegrityError(
                f"the weights of {name} could not be read again after they were checked: {error}"
            ) from error
        if loaded != checked:
            changed = next(key for key in sorted(checked) if loaded.get(key) != checked[key])
            raise IntegrityError(
                f"piece {changed[1]} of tensor {changed[0]} changed while the reload read it"
            )
        self._settle()
        return self._digest(weights)

    def _check_together(self, name: str, tick: Tick) -> tuple[Path, Digests, str]:
        """Directory, this rank's digests and all ranks' merged one. Raises ReloadError on all."""
        refusal, checked = None, None
        try:
            checked = self._check(name, tick)
        except Exception as error:
            kind = error if isinstance(error, TpdetError) else TpdetError()
            refusal = (kind.exit_code, kind.code, str(error) or type(error).__name__)
        answers = self._world.gather_bytes(msgspec.msgpack.encode(refusal))
        for rank, data in enumerate(answers):
            refusal_there = _refusals.decode(data)
            if refusal_there is not None:
                exit_code, code, message = refusal_there
                where = f"{rank_on_node(self._world, rank)}: " if self._world.size > 1 else ""
                raise ReloadError(f"{where}{message}", exit_code, code)
        assert checked is not None
        directory, digests = checked
        try:
            weights = merge_digests(self._world, digests)
        except TpdetError as error:
            if isinstance(error, PeerLostError):
                raise
            raise ReloadError(str(error), error.exit_code, error.code) from error
        return directory, digests, weights

    def _check(self, name: str, tick: Tick) -> tuple[Path, Digests]:
        """Read everything and keep nothing."""
        if self._config.load_format == "dummy":
            raise UsageError("load_format is 'dummy': random weights have nothing to reload from")
        same = name == self._config.model
        directory = resolve_model(name, self._config.revision if same else None)
        self._check_config(directory)
        self._check_tokenizer(directory)
        source = self.open_source(directory, torch.device("cpu"), tick)
        source.read_again(self.reads)
        return directory, self._finish(source)

    def _check_config(self, directory: Path) -> None:
        changed = load_model_config(directory, self._config.dtype)
        for field in fields(ModelConfig):
            old, new = (getattr(config, field.name) for config in (self._model, changed))
            if old != new:
                raise CheckpointError(
                    f"config.json: {field.name} is {new!r}, the model that serves has {old!r}: a "
                    "reload changes weights only, restart the server for another model"
                )

    def _check_tokenizer(self, directory: Path) -> None:
        """The HTTP process keeps its tokenizer, so the files it came from must be the same."""
        changed = self._served_tokenizer(directory)
        for name in _TOKENIZER_FILES if changed else ():
            old, new = (digests.get(name, "absent") for digests in (self._tokenizer, changed))
            if old != new:
                raise CheckpointError(
                    f"{name} is {new[:16]}, the model that serves has {old[:16]}: a reload changes "
                    "weights only, restart the server for another tokenizer"
                )

    def _served_tokenizer(self, directory: Path) -> dict[str, str]:
        """The digests of the model's own tokenizer; none where it is not the one that serves."""
        if self._config.skip_tokenizer_init or self._config.tokenizer is not None:
            return {}
        return tokenizer_digests(directory)

    def open_source(
        self, directory: Path, device: torch.device, tick: Tick | None = None
    ) -> WeightSource:
        """The weights below `directory`, to be read to `device`; `tick` is called at each read."""
        config, shown = self._config, self._world.rank == 0
        threads = min(MOST_THREADS, threads_per_rank(self._world.local_size))
        source = open_weights(
            directory, self._model, config.load_format, config.seed, shown, device, threads
        )
        source.tick = tick
        return source

    def _finish(self, source: WeightSource) -> Digests:
        tied = _TIED if self._model.tie_word_embeddings else None
        return source.finish(tied, _unread(self._model))

    def _digest(self, weights: str) -> str:
        return model_digest(self._model, weights)


class Loading:
    """A model in memory, and the thread that reads its weights, if there is one.

    `with` it: where the block raises, the thread ends after the tensor that it reads.
    """

    digest = ""
    """Names the weights, once `finish` has returned."""

    def __init__(
        self, decoder: Decoder, source: WeightSource, agree: Callable[[Decoder, WeightSource], str]
    ) -> None:
        """agree: collective; gives the digest of weights that were read."""
        self.decoder = decoder
        self._source, self._agree = source, agree
        self._thread: Future[None] | None = None
        self._given_up = False

    def begin(self, device: torch.device) -> None:
        """Read the weights in a thread, into the memory of the decoder's. Not collective."""
        self._source.tick = self._tick
        pool = ThreadPoolExecutor(1, "loading")
        self._thread = pool.submit(self._read, device)
        pool.shutdown(wait=False)

    def _read(self, device: torch.device) -> None:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.decoder.load(self._source)

    def wait(self) -> None:
        """Return when this rank has read its weights. Not collective; raises as `finish`."""
        if self._thread is not None:
            self._thread.result()

    def finish(self) -> None:
        """Return when all ranks have their weights and agree on the digest. Collective.

        Raises as `WeightSource.read`, and DisagreementError.
        """
        self.wait()
        self.digest = self._agree(self.decoder, self._source)

    def _tick(self) -> None:
        if self._given_up:
            raise CancelledError

    def __enter__(self) -> "Loading":
        return self

    def __exit__(self, *_: object) -> None:
        self._given_up = True
        if self._thread is not None:
            wait([self._thread])


def _unread(model: ModelConfig) -> tuple[str, ...]:
    """Beginnings of names of layers that guess further tokens, behind the last layer."""
    count = 0 if model.mixture is None else model.mixture.guessing_layers
    return tuple(f"model.layers.{model.num_layers + index}." for index in range(count))


def tokenizer_digests(directory: Path) -> dict[str, str]:
    """BLAKE3 (hex) of the tokenizer's files that are there, by name; of a GGUF file's own."""
    if is_gguf(directory):
        text, config, template = read_gguf_tokenizer(directory)
        made = json.dumps([text, config, template]).encode()
        return {_TOKENIZER_FILES[0]: blake3.blake3(made).hexdigest()}
    return {
        name: blake3.blake3((directory / name).read_bytes()).hexdigest()
        for name in _TOKENIZER_FILES
        if (directory / name).is_file()
    }


def read_model(config: EngineConfig, device: str) -> tuple[Path, ModelConfig, int]:
    """Directory, configuration and context length of the model to serve; reads no weights yet.

    Raises NotFoundError, CheckpointError (also where the files have other sizes than `config.json`
    says) and UsageError.
    """
    directory = resolve_model(config.model, config.revision)
    model = load_model_config(directory, config.dtype)
    check_experts(model, config.row_layers, config.may_be_approximate)
    check_widths(model, device)
    if config.enable_return_routed_experts and not model.experts:
        raise UsageError(
            f"{model.family} has no experts to return: leave enable_return_routed_experts out"
        )
    positions = context_length(config.max_model_len, model)
    if config.load_format != "dummy":
        check_sizes(directory, sized_tensors(model))
    return directory, model, positions
