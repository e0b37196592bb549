"""The draft model: a second, small model on rank 0's device, which guesses what sequences sample.

It is a world of its own with one rank, its own KV pages and its own page table. For each sequence
that it drafts for it has a copy: the tokens, and how many of them are in its pages. To draft, it
computes the tokens that a copy lacks, and then one token of every copy a step. It samples with the
request's seed, positions and filters, so that equal distributions draw equal tokens. Drafts that
turn out wrong are forgotten: the copy is cut, and its pages are written again.

What it proposes is verified like any draft (docs/drafts.md), so none of this reaches a bit.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Rows
from itertools import takewhile

import msgspec
import torch

from tpdet.checkpoint.model_config import ModelConfig, load_model_config
from tpdet.checkpoint.resolve import resolve_model
from tpdet.comm.device import current_device, free_gpu_bytes, resolve_device
from tpdet.comm.world.world import SoloWorld, World
from tpdet.config import EngineConfig
from tpdet.control.plan import PLAN_VERSION, StepPlan
from tpdet.control.row_messages import RowKey, SampledToken
from tpdet.errors import NumericalError, ResourceError
from tpdet.kernels.inputs.plain_rows import PlainRows
from tpdet.kernels.inputs.vocabulary_shard import Shard
from tpdet.kernels.order import DEFAULT_FOLD_ORDER, PAGE_TOKENS
from tpdet.layers.partition import make_partition
from tpdet.models.footprint import weight_bytes
from tpdet.runner import Runner, SampleTogether
from tpdet.runner.graphs.decode_chain import DecodeChain
from tpdet.runner.graphs.draft_graphs import USUAL_SEQUENCES
from tpdet.runner.start.contracts import partition_of
from tpdet.runner.start.load_model import LOAD_TIMEOUT
from tpdet.runner.start.memory import check_room, least_bytes
from tpdet.runner.start.step_tokens import LEAST_TOKENS
from tpdet.runner.step.gpu_wait import wait_for_event
from tpdet.sampling.sampler import PendingSample, finish, sample_columns
from tpdet.scheduler.page_manager import PageManager
from tpdet.scheduler.rows import plan_rows
from tpdet.scheduler.sequence import PENDING, Sequence, pages_for
from tpdet.speculative.draft_model.chain import Answers, LaterSteps
from tpdet.speculative.draft_model.pace import DraftPace
from tpdet.speculative.draft_model.pair import draft_page_bytes, draft_pages, read_draft_model

_CPU_PAGES = 1024  # at most, where nothing says how many
_PAIR = 2  # tokens that a copy lacks after all of its drafts were right
Instead = Callable[[Sequence, list[int]], list[int]]
_log = logging.getLogger("tpdet.engine")


class DraftModel:
    """A loaded draft model. `runner` has a world of one rank; its pages are not in use.

    Its steps run between those of the engine, on the same stream: nothing of one meets the other.
    """

    def __init__(self, runner: Runner, vocabulary: int) -> None:
        """vocabulary: token ids of the model that it drafts for, perhaps more or fewer than its."""
        self.runner, self._vocabulary = runner, vocabulary
        self._pages = PageManager(runner.num_pages)
        self._copies: OrderedDict[RowKey, _Copy] = OrderedDict()  # the latest used last
        self.pace = DraftPace(runner.loaded.config.step_timeout)
        self._step = 0
        self._chain = runner.decode_chain()
        if self._chain is not None:
            width = pages_for(runner.max_model_len)
            self._chain.capture(runner.loaded.config.max_running, width, _PAIR)

    def seconds(self, sequences: int) -> float:
        """Of a step in which each of so many gets a draft; 0 until it is measured."""
        return self.pace.seconds(sequences)

    def first_seconds(self, sequences: int) -> float:
        """Of the first such step of a call; 0 until it is measured."""
        return self.pace.first_seconds(sequences)

    def captures(self, sequences: int) -> bool:
        """Whether the first drafts of so many sequences may have to capture graphs."""
        return self._chain is not None and sequences > USUAL_SEQUENCES

    def entry_seconds(self, sequence: Sequence) -> float:
        """What computing the tokens that its copy lacks takes; 0 where a usual step does so."""
        copy = self._copies.get(sequence.key)
        lacking = len(sequence.tokens) - (0 if copy is None else copy.sequence.computed)
        return self.pace.entry_seconds if lacking > _PAIR else 0.0

    def draft(
        self, wanted: Rows[tuple[Sequence, int]], instead: Instead | None = None
    ) -> list[list[int]]:
        """At most so many drafts behind the known tokens of each sequence; [] where room is short.

        A prompt that is longer than a step is computed over several calls, which give no drafts.
        instead: for benchmarks, says others in place of a sequence's drafts, as if sampled.
        Raises NumericalError for NaN in its logits, and TimeoutError where a step or the call took
        longer than it may. What a GPU still computes then ends before the engine's next step.
        """
        self.pace.begin(len(wanted))
        counts: dict[RowKey, int] = {}
        copies: dict[RowKey, Sequence] = {}
        for target, count in wanted:
            room = self.runner.max_model_len + 1 - len(target.tokens)
            if min(count, room) > 0 and (copy := self._follow(target)) is not None:
                copies[target.key] = copy
                counts[target.key] = min(count, room)
        copies = {key: copies[key] for key in sorted(copies) if self._reserve(key, copies, counts)}
        lacking = {key: len(copy.tokens) - copy.computed for key, copy in copies.items()}
        known = {key: len(copy.tokens) for key, copy in copies.items()}
        steps: list[_Step] = []
        budget = self.runner.step_tokens.most
        for key in sorted(copies, key=lambda key: (lacking[key], key)):
            budget -= (taken := min(lacking[key], budget))
            if taken < lacking[key]:
                del counts[key]
            lacking[key] = taken
        rows = {key: count for key, count in lacking.items() if count}
        later = None if self._chain is None else LaterSteps(self._chain, self._pages.table)
        while rows:
            behind = later if steps else None
            steps.append(self._launch([copies[key] for key in rows], [*rows.values()], behind))
            if len(steps) > 1:
                self._wait(steps[-2], urgent=False)
            rows = {key: 1 for key in copies if counts.get(key, 0) > len(steps)}
        if later is not None:
            later.end()
        if steps:
            self._wait(steps[-1], urgent=True)
        for step in steps:
            step.write()
        self.pace.finish()
        return [self._found(target, known, counts, instead) for target, _ in wanted]

    def forget(self, key: RowKey) -> None:
        """Give back the pages of a sequence, which may be unknown."""
        found = self._copies.pop(key, None)
        if found is not None:
            self._pages.release(found.sequence)

    def close(self) -> None:
        """Let go of graphs, pages and weights."""
        self._chain = None
        self.runner.close()

    def _follow(self, target: Sequence) -> Sequence | None:
        """The copy of a sequence: what it has behind the first difference is forgotten.

        None for a sequence with a token that the draft model does not have.
        """
        key = target.key
        if key not in self._copies:
            self._copies[key] = _Copy(_plain(target))
        self._copies.move_to_end(key)
        copy = self._copies[key]
        followed = copy.follow(target.tokens)
        return followed if copy.largest < self.runner.model_config.vocab_size else None

    def _reserve(
        self, key: RowKey, copies: dict[RowKey, Sequence], counts: dict[RowKey, int]
    ) -> bool:
        """Take the pages of a copy and its drafts; False, and no pages, if too few are free."""
        copy = copies[key]
        missing = pages_for(len(copy.tokens) + counts[key] - 1) - len(copy.pages)
        if missing <= 0:
            return True
        for other in [it for it in self._copies if it not in copies]:
            if missing <= self._pages.free_count:
                break
            self.forget(other)
        if missing > self._pages.free_count:
            del counts[key]
            return False
        known = len(copy.tokens)
        copy.tokens += [PENDING] * (counts[key] - 1)
        self._pages.grow(copy)
        del copy.tokens[known:]
        return True

    def _launch(
        self, copies: list[Sequence], counts: list[int], later: LaterSteps | None
    ) -> "_Step":
        """Start a step that computes the next tokens of copies, in the order of their keys.

        later: of a step behind the call's first, if there are graphs.
        """
        if later is not None and (answers := later.launch(copies)) is not None:
            step = _Step(copies, counts, counts, answers)
            self._launched(step, self.runner.event())
            return step
        for copy, count in zip(copies, counts, strict=True):
            # As a row with a draft, so that it goes through the graphs of such rows.
            ends = copy.computed + count == len(copy.tokens)
            copy.drafted = 1 if count == _PAIR and ends else 0
        rows = plan_rows(copies, counts)
        events, digest = self._pages.take_events(), self._pages.table.digest()
        plan = StepPlan(PLAN_VERSION, self._step, events, rows, digest, feeds=True)
        self._step += 1
        step = _Step(copies, counts, rows.samples.tolist(), chain=self._chain)
        self._launched(step, self.runner.launch(plan, step))
        return step

    def _launched(self, step: "_Step", event: torch.cuda.Event | None) -> None:
        step.event = event
        if event is None:  # a CPU has computed it
            self.pace.end(step.is_short, sequences=step.rows)

    def _wait(self, step: "_Step", urgent: bool) -> None:
        """Wait for a step on a GPU, no longer than it may take."""
        if step.event is not None:
            left = self.pace.left(step.is_short)
            in_time = wait_for_event(step.event, left, urgent)
            self.pace.end(step.is_short, in_time, step.rows)

    def _found(
        self,
        target: Sequence,
        known: dict[RowKey, int],
        counts: dict[RowKey, int],
        instead: Instead | None,
    ) -> list[int]:
        """The drafts of a sequence."""
        if target.key not in counts:
            return []
        tokens, first = self._copies[target.key].sequence.tokens, known[target.key]
        if instead is not None:
            tokens[first:] = instead(target, tokens[first:])
        return list(takewhile(lambda token: token < self._vocabulary, tokens[first:]))


class _Copy:
    """A sequence as the draft model has it, and how many of its tokens were compared."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence, self._compared = sequence, 0
        self.largest = 0  # token id of the sequence itself

    def follow(self, tokens: Rows[int]) -> Sequence:
        """Have `tokens`, which begin with those of the last call; the last is not computed yet."""
        mine, same = self.sequence.tokens, min(self._compared, len(tokens))
        while same < min(len(mine), len(tokens)) and mine[same] == tokens[same]:
            same += 1
        self.largest = max([self.largest, *tokens[self._compared :]])
        del mine[same:]
        mine += tokens[same:]
        self._compared = len(mine)
        self.sequence.computed = min(self.sequence.computed, same, len(mine) - 1)
        return self.sequence


class _Step:
    """One launched step: takes its logits, and writes what it sampled behind the copies' tokens."""

    event: torch.cuda.Event | None = None

    def __init__(
        self,
        copies: list[Sequence],
        counts: list[int],
        samples: list[int],
        answers: Answers | None = None,
        chain: DecodeChain | None = None,
    ) -> None:
        """Advance the copies by the step, which computes and samples so many tokens of each.

        answers: of a step that takes no logits. chain: may sample from those that a graph keeps.
        """
        self._answers, self._chain = answers, chain
        self.is_short, self.rows = max(counts) <= _PAIR, len(counts)
        self._sequences: list[Sequence] = []
        self._ends: list[int] = []  # the position of each sampled token
        self._places: list[tuple[Sequence, int, int]] = []  # of a copy's token: in it, in the step
        self._pending: list[PendingSample] = []
        place = 0
        for copy, count, sampled in zip(copies, counts, samples, strict=True):
            copy.computed += count
            copy.drafted, place = 0, place + sampled
            if answers is None:
                self._sequences += [copy] * sampled
                self._ends += range(copy.computed - sampled + 1, copy.computed + 1)
            if sampled:
                copy.sample_index = place - 1
                self._places.append((copy, len(copy.tokens), copy.sample_index))
                copy.tokens.append(PENDING)

    def take(
        self, first: int, logits: torch.Tensor, together: SampleTogether | None
    ) -> torch.Tensor:
        """Sample at each of the logits."""
        sequences = self._sequences[first : first + len(logits)]
        packed = b"".join([it.packed_sampling for it in sequences])
        params = PlainRows(packed, self._ends[first : first + len(logits)])
        found = None if self._chain is None else self._chain.sample(logits, params)
        if found is None:
            shard = Shard(0, logits.shape[1])
            found = sample_columns(logits, params, [None] * len(sequences), shard)
        self._pending.append(found)
        return self._pending[-1].tokens

    def write(self) -> None:
        """Put the sampled tokens in their places. Raises NumericalError for NaN in the logits."""
        if self._answers is not None:
            self._pending.append(self._answers())
        found = [it for pending in self._pending for it in finish(pending)]
        for copy, place, index in self._places:
            token = found[index]
            if not isinstance(token, SampledToken):
                raise NumericalError(f"{token.reason} of the draft model")
            copy.tokens[place] = token.token_id


def _plain(target: Sequence) -> Sequence:
    """An empty copy that samples by what is cheap: no penalties, biases, schema or end."""
    params = msgspec.structs.replace(
        target.request.params,
        min_tokens=0,
        logprobs=None,
        prompt_logprobs=None,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        logit_bias={},
        json_schema=None,
        regex=None,
        json_schema_after=None,
    )
    request = msgspec.structs.replace(target.request, params=params, drafts=(), prediction=())
    copy = Sequence.of(request, *target.key)
    copy.tokens.clear()
    copy.wait_for_drafts(True)  # its rows may have a draft
    return copy


def start_draft_model(
    config: EngineConfig, world: World, loaded: bool = False
) -> DraftModel | None:
    """Load the draft model on rank 0, if there is to be one; the other ranks wait. Collective.

    To be called before the KV pages of the model itself are counted; loaded: whether its weights
    are on the GPU already. Raises as `Runner.start` and `read_draft_model`, and ResourceError where
    a GPU has no room for it, or for the model itself beside it.
    """
    if config.draft_model is None or not config.drafters:
        return None
    world.set_timeout(max(LOAD_TIMEOUT, config.step_timeout))
    model = load_model_config(resolve_model(config.model, config.revision), config.dtype)
    beside = 0
    if not loaded:
        partition = partition_of(config, model, world)
        check_room(config, partition, current_device(resolve_device(config.device)))
        beside = sum(least_bytes(config, partition))
    found = None
    if world.rank == 0:
        runner = Runner.start(draft_settings(config, beside), SoloWorld())
        runner.loaded.ahead.close()  # what the model itself compiles next is no late kernel
        found = DraftModel(runner, model.vocab_size)
    world.barrier()
    world.set_timeout(config.step_timeout)
    return found


def held_bytes(draft: ModelConfig, pages: int) -> int:
    """Bytes of a draft model's weights and of its KV pages: it is whole on one rank."""
    whole = make_partition(draft, SoloWorld(), DEFAULT_FOLD_ORDER, None)
    return weight_bytes(whole) + pages * draft_page_bytes(draft)


def draft_settings(config: EngineConfig, beside: int = 0) -> EngineConfig:
    """How the draft model itself is run; says how much memory its pages take.

    beside: bytes that rank 0's GPU must have left for the model itself.
    """
    directory, draft = read_draft_model(config)
    context = min(config.max_model_len or draft.max_position, draft.max_position)
    if config.max_model_len is not None and context < config.max_model_len:
        _log.warning("the draft model has a context of %s: drafts of it end there", context)
    pages = config.kv_pages or min(config.max_running * -(-context // PAGE_TOKENS), _CPU_PAGES)
    if resolve_device(config.device) == "cuda":
        free = free_gpu_bytes(config.gpu_memory_utilization)
        pages = config.kv_pages or draft_pages(draft, config.max_running, context, free)
        needed = held_bytes(draft, pages)
        most = free if config.kv_pages is None else free_gpu_bytes(1.0)
        if pages < 1 or needed > free or needed + beside > most:
            other = f" and the model itself {beside / 2**30:.1f} GiB" if beside else ""
            raise ResourceError(
                f"draft_model {directory} takes {needed / 2**30:.1f} GiB with {pages} KV pages"
                f"{other}, rank 0's GPU has {free / 2**30:.1f} GiB left: take a smaller one, raise "
                "--gpu-memory-utilization, or leave --draft-model out"
            )
    size = pages * draft_page_bytes(draft) / 2**30
    _log.info("draft model %s: %s KV pages, %.2f GiB", directory, pages, size)
    return EngineConfig.from_values(
        model=str(directory),
        skip_tokenizer_init=True,
        load_format=config.load_format,
        dtype=config.dtype,
        device=config.device,
        max_model_len=context,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or LEAST_TOKENS,
        gpu_memory_utilization=config.gpu_memory_utilization,
        enforce_eager=config.enforce_eager,
        compile_ahead=config.compile_ahead,
        drafts="off",
        kv_pages=pages,
        enable_prefix_caching=False,
        seed=config.seed,
        step_timeout=config.step_timeout,
    )
