"""A model's weights on this rank: loaded at start, and again, in place, by a reload.

A reload reads everything twice. First all ranks check the whole checkpoint and exchange what they
found. If one refuses, no rank loads it and the old weights go on serving. Only then are weights
overwritten, and what is read the second time must have the digests of the first.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import blake3
import msgspec
import torch

from tpdet.checkpoint.checkpoint import check_sizes
from tpdet.checkpoint.checks import check_packed
from tpdet.checkpoint.digests import Digests
from tpdet.checkpoint.gguf.header import is_gguf
from tpdet.checkpoint.gguf.tokenizer import read_gguf_tokenizer
from tpdet.checkpoint.model_config import FAMILIES, ModelConfig
from tpdet.checkpoint.model_config.fit import check_modes, check_widths, context_length
from tpdet.checkpoint.model_config.pooling import check_pooling, load_for_task
from tpdet.checkpoint.model_config.stored_form import StoredForm, read_stored_form
from tpdet.checkpoint.packing import Packing
from tpdet.checkpoint.resolve import resolve_model
from tpdet.checkpoint.sample import sample_checkpoint
from tpdet.checkpoint.source import UnreadWeights, WeightRead, WeightSource, open_weights
from tpdet.checkpoint.transfer.arriving import ArrivingWeights, HashParts
from tpdet.comm.agreement import agree
from tpdet.comm.weight_digests import MergedDigests, merge_digests
from tpdet.comm.world.world import World, rank_on_node
from tpdet.config import EngineConfig
from tpdet.errors import (
    CheckpointError,
    DrainTimeoutError,
    IntegrityError,
    PeerLostError,
    ReloadError,
    TpdetError,
    UsageError,
)
from tpdet.kernels.cuda.hardware import gpu_of
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
_TWO_CHUNKS = 2048  # bytes of BLAKE3's, which take all of its kernels

ENDINGS = PeerLostError, DrainTimeoutError
"""Errors that end this process, whatever others do: there is nobody to tell, or no time."""
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
        self._form = StoredForm()
        self._forms: Mapping[str, object] = {}
        self.packed = config.weights == "packed"
        """Whether quantised weights stay as they are stored."""
        self.tensor_digests: dict[str, str] = {}
        """BLAKE3 (hex) of each tensor of the weights that were read last, by its name."""

    def begin(
        self, directory: Path, partition: Partition, positions: int, beside: bool
    ) -> "Loading":
        """The model in memory, whose weights `Loading.finish` waits for; `positions` as `Decoder`.

        beside: they are read in a thread, while this one does something else; else they are read
        when this returns. Raises as `WeightSource.read`, and DisagreementError.
        """
        _log.info("loading weights of %s", self._config.model)
        source = self.open_source(directory, self._device)
        self._form, self._forms = read_stored_form(directory), source.forms
        if self._world.size > 1:
            agree(self._world, sample_checkpoint(directory, source.files))
        self._tokenizer = self._served_tokenizer(directory)
        if not beside:
            return Loading(Decoder(source, partition, positions), source, self._agree)
        dtype = getattr(torch, self._model.dtype)
        unread = UnreadWeights(dtype, self._device, source.packing)
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
        checked = self.check(name, tick)
        self.overwrite(decoder, checked, tick)
        return self.settle(checked)

    def overwrite(self, decoder: Decoder, checked: "CheckedModel", tick: Tick) -> None:
        """Read a checked model again, over the weights of `decoder`. Not collective.

        Raises IntegrityError when it was changed meanwhile.
        """
        try:
            source = self.open_source(checked.directory, torch.device("cpu"), tick)
            decoder.load(source)
            loaded = self._finish(source)
        except ENDINGS:
            raise
        except Exception as error:
            raise IntegrityError(
                f"the weights of {checked.name} could not be read again after they were checked: "
                f"{error}"
            ) from error
        own = checked.digests
        if loaded != own:
            changed = next(key for key in sorted(own) if loaded.get(key) != own[key])
            raise IntegrityError(
                f"piece {changed[1]} of tensor {changed[0]} changed while the reload read it"
            )

    def settle(self, checked: "CheckedModel") -> str:
        """The digest of the model that every rank has in place now. Collective."""
        self._settle()
        return self._digest(checked.weights)

    def arriving(self, decoder: Decoder) -> ArrivingWeights:
        """A source of tensors that a sender has: each is laid out over the old one as it arrives.

        Not collective. Nothing has changed before the first arrives.
        """
        threads = min(MOST_THREADS, threads_per_rank(self._world.local_size))
        dtype, unread = getattr(torch, self._model.dtype), _unread(self._model)
        source = ArrivingWeights(
            dtype,
            self._device,
            threads,
            self._form,
            _tied(self._model),
            unread,
            hash_on(self._device),
        )
        decoder.load(source)
        source.expect_tied()
        return source

    def commit(self, source: ArrivingWeights) -> str:
        """The model's digest once all its tensors have arrived everywhere. Collective.

        Raises ReloadError, on every rank, where one has a tied twin with other bits, and
        DisagreementError where ranks got different bits.
        """
        digests: Digests = {}
        with refusing_together(self._world):
            digests = source.finish_arrived()
        self._settle()
        return self._digest(merge_digests(self._world, digests))

    def check(self, name: str, tick: Tick) -> "CheckedModel":
        """Read all of model `name` and keep nothing. Collective; raises ReloadError on all."""
        checked = None
        with refusing_together(self._world):
            checked = self._check(name, tick)
        assert checked is not None
        directory, digests = checked
        try:
            weights = merge_digests(self._world, digests)
        except TpdetError as error:
            if isinstance(error, PeerLostError):
                raise
            raise ReloadError(str(error), error.exit_code, error.code) from error
        return CheckedModel(name, directory, digests, weights)

    def _check(self, name: str, tick: Tick) -> tuple[Path, Digests]:
        """Read everything and keep nothing."""
        if self._config.load_format == "dummy":
            raise UsageError("load_format is 'dummy': random weights have nothing to reload from")
        same = name == self._config.model
        directory = resolve_model(name, self._config.revision if same else None)
        self._check_config(directory)
        self._check_tokenizer(directory)
        source = self.open_source(directory, torch.device("cpu"), tick)
        if self.packed and source.forms != self._forms:
            raise CheckpointError(
                f"{name} has other quantised forms than the model that serves, whose weights are "
                "packed: restart the server on it, or serve with weights dense"
            )
        source.read_again(self.reads)
        return directory, self._finish(source)

    def _check_config(self, directory: Path) -> None:
        changed, _ = load_for_task(directory, self._config.dtype, self._config.task)
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
            directory,
            self._model,
            config.load_format,
            config.seed,
            shown,
            device,
            threads,
            self.packed,
        )
        source.tick = tick
        source.packing.on_gpu = self._device.type == "cuda"
        if self.packed and self._device.type == "cuda" and not gpu_of(self._device).wgmma:
            raise UsageError("weights packed need Hopper on a GPU: use weights auto")
        return source

    def _finish(self, source: WeightSource) -> Digests:
        return finish_reading(source, self._model)

    def _digest(self, weights: MergedDigests) -> str:
        self.tensor_digests = weights.tensors
        return model_digest(self._model, weights.whole)


class CheckedModel(NamedTuple):
    """A model that may be loaded; `digests` are this rank's, `weights` those of all ranks."""

    name: str
    directory: Path
    digests: Digests
    weights: MergedDigests


@contextmanager
def refusing_together(world: World) -> Iterator[None]:
    """Raise ReloadError on every rank where the block raises on one. Collective.

    Rank and node are named. Not for ENDINGS.
    """
    refusal = None
    try:
        yield
    except ENDINGS:
        raise
    except Exception as error:
        kind = error if isinstance(error, TpdetError) else TpdetError()
        refusal = (kind.exit_code, kind.code, str(error) or type(error).__name__)
    for rank, data in enumerate(world.gather_bytes(msgspec.msgpack.encode(refusal))):
        refusal_there = _refusals.decode(data)
        if refusal_there is not None:
            exit_code, code, message = refusal_there
            where = f"{rank_on_node(world, rank)}: " if world.size > 1 else ""
            raise ReloadError(f"{where}{message}", exit_code, code)


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

    @property
    def packing(self) -> Packing:
        """How weights stay packed; the forms that a GPU has are known when the model is made."""
        return self._source.packing

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


def hash_on(device: torch.device) -> HashParts | None:
    """What digests tensors on a GPU; None on a CPU."""
    if device.type != "cuda":
        return None
    from tpdet.kernels.cuda.digests.blake3 import blake3_of  # Triton is there with a GPU

    return blake3_of


def compile_hash(device: torch.device) -> None:
    """Compile what digests tensors on a GPU: seconds, once, that an update need not wait for."""
    hash_parts = hash_on(device)
    if hash_parts is not None:
        hash_parts([b""], [torch.zeros(_TWO_CHUNKS, dtype=torch.uint8, device=device)])


def finish_reading(source: WeightSource, model: ModelConfig) -> Digests:
    """The digests of all pieces read. Raises CheckpointError for tensors without a place."""
    return source.finish(_tied(model), _unread(model))


def _tied(model: ModelConfig) -> tuple[str, str] | None:
    return _TIED if model.tie_word_embeddings and model.head == "tokens" else None


def _unread(model: ModelConfig) -> tuple[str, ...]:
    """Beginnings of names: an output head that is not used, what guesses further tokens."""
    count = 0 if model.mixture is None else model.mixture.guessing_layers
    heads = () if model.head == "tokens" else ("lm_head.",)
    guessing = FAMILIES[model.architecture].unread if model.architecture in FAMILIES else ()
    return (
        *heads,
        *guessing,
        *(f"model.layers.{model.num_layers + index}." for index in range(count)),
    )


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
    model, pooling = load_for_task(directory, config.dtype, config.task)
    if pooling is not None:
        check_pooling(pooling, config.may_be_approximate)
    check_modes(model, config.row_layers, config.may_be_approximate)
    check_packed(config, directory)
    check_widths(model, device)
    if config.enable_return_routed_experts and not model.experts:
        raise UsageError(
            f"{model.family} has no experts to return: leave enable_return_routed_experts out"
        )
    positions = context_length(config.max_model_len, model)
    if config.load_format != "dummy":
        check_sizes(directory, sized_tensors(model))
    return directory, model, positions
