"""The common base of LLM and AsyncLLM: settings, tokenizer, engine."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Self

from tpdet.audit.recorded import RecordedAnswer, check_recorded, checked_params
from tpdet.checkpoint.resolve import resolve_tokenizer
from tpdet.config import EngineConfig
from tpdet.errors import RequestError, UsageError
from tpdet.kernels.order import DEFAULT_FOLD_ORDER
from tpdet.launch.life.faults import refuse_faults
from tpdet.launch.life.garbage import no_garbage
from tpdet.launch.life.run_secret import given_secret
from tpdet.launch.ranks.environment import read_environment
from tpdet.launch.ranks.rank_environment import RankEnvironment
from tpdet.llm.followers import Followers
from tpdet.llm.own_arithmetic import own_arithmetic
from tpdet.llm.pooling import PoolingPlans
from tpdet.llm.prompts import Asked, Predictions, PromptReader, ReadPrompt, read_params
from tpdet.llm.recorded import recorded_answer, refuse_unverified
from tpdet.llm.results import RequestOutput, ResultWriter
from tpdet.llm.settings import read_settings
from tpdet.llm.vllm_keywords import METHODS, refuse_what_asks
from tpdet.requests.engine_facts import RAW_LOGPROBS, LogprobsMode, SeedPolicy
from tpdet.requests.request import Request, SamplingParams
from tpdet.scheduler.limits import check_drafts
from tpdet.text.hugging_face import HuggingFaceTokenizer
from tpdet.text.outputs import RequestAssembler
from tpdet.text.tokenizer import Tokenizer, ending_ids
from tpdet.text.tokenizer_ahead import TokenizerAhead

if TYPE_CHECKING:
    from tpdet.comm.world.world import World
    from tpdet.engine import Engine

Params = SamplingParams | Sequence[SamplingParams] | None


class OfflineModel(PoolingPlans, ABC):
    """A model in this process, or one rank's share of it.

    model: Hugging Face directory, or a hub name where there is a network.
    tensor_parallel_size: how many ranks share the model. Without a launcher this process is rank
        0 and starts the others, as children that end with it. Under torchrun (`torchrun
        --nproc-per-node N SCRIPT`) it must be the number of its ranks; None takes any number.
    tokenizer: the tokenizer's directory; the model's if None.
    skip_tokenizer_init: use token ids only. revision: of the hub.
    chat_template: file with a Jinja template.
    chat_template_date: such as "2026-01-31": the date that a template prints which calls
        strftime_now (of gpt-oss, for example), unless chat_template_kwargs has current_date.
    load_format: "dummy" makes random weights.
    weights: "packed" keeps quantised ones as they are stored, on a CPU; no bit depends on it.
    task: "auto" is what the checkpoint is for; "generate", "embed", "classify", "score" (of pairs)
        or "reward" say it. With another than "generate" there are `embed`, `classify`, `score` and
        `reward` in place of `generate` (docs/offline.md).
    dtype: "auto" is the checkpoint's; "float32", "bfloat16", "float16" or a short name.
    device: "cpu", "cuda", or "auto" for a GPU if there is one.
    seed: key of the stream that gives a seed to each request without one.
    seed_policy: "request" gives it one that is a function of its prompt and its parameters instead.
    max_model_len: tokens of prompt and answer together, at most; the model's context if None.
    max_num_seqs, max_num_batched_tokens: sequences and tokens of one step, at most. Tokens, if
        None: 2,048 on a CPU, 8,192 on a GPU (fewer where they would take over 2 % of the KV cache).
    max_queue: requests that wait in the engine, at most; further ones wait outside.
    gpu_memory_utilization, kv_pages: share of the GPU's memory to use, or pages of 256 tokens.
    enable_prefix_caching, enforce_eager, compile_ahead, share_draws, fixed_batch: how steps are
        run; no bit depends on them.
    drafts: who proposes tokens that are verified together; no bit depends on it. "off", "ngram",
        "schema", "auto" (both) or "earlier" (also earlier outputs of the same prompt).
    draft_model: directory of a small model with the same tokenizer, which also proposes tokens.
    enable_return_routed_experts: results hold the experts that each token chose, of every layer
        that has some. Prefixes are then not shared, and stop strings are refused.
    kernel_cache: directory that `tpdet compile` made; a GPU's start reads kernels there.
    fold_order, row_layers, leaves: the order of sums, which is part of the contract id.
    kv_cache_dtype: "fp8" keeps keys and values in e4m3 with powers of two; part of the contract id.
    experts: where those of a mixture lie, whole on ranks (lanes) or cut over all (columns).
    transport: what carries sums between ranks.
    logprobs_mode: "raw_logprobs" or "processed_logprobs": whether the log-probabilities of sampled
        tokens are of the model's own logits, or of what is sampled from (docs/numerics.md).
    approximate: stock arithmetic, which is not deterministic.
    step_timeout, start_timeout: seconds after which a silent rank counts as lost.
    weights_timeout: seconds after which the silent sender of a weight update does.

    Keywords of `vllm.LLM` that ask for what holds anyway (`trust_remote_code=False`) are accepted.
    On the CPU, torch's own threads are set to one: the engine runs its own.

    Raises UsageError, NotFoundError, CheckpointError or ResourceError before any request runs.
    """

    def __init__(
        self,
        model: str | PathLike[str],
        *,
        tensor_parallel_size: int | None = None,
        tokenizer: str | None = None,
        skip_tokenizer_init: bool = False,
        revision: str | None = None,
        chat_template: str | None = None,
        chat_template_date: str | None = None,
        load_format: Literal["auto", "safetensors", "dummy"] = "auto",
        weights: Literal["auto", "packed", "dense"] = "auto",
        task: Literal["auto", "generate", "embed", "classify", "score", "reward"] = "auto",
        dtype: str = "auto",
        device: Literal["auto", "cpu", "cuda"] = "auto",
        seed: int = 0,
        seed_policy: SeedPolicy = "random",
        max_model_len: int | str | None = None,
        max_num_seqs: int | str = 256,
        max_num_batched_tokens: int | str | None = None,
        max_queue: int | str = 1024,
        gpu_memory_utilization: float = 0.9,
        kv_pages: int | str | None = None,
        enable_prefix_caching: bool = True,
        enable_return_routed_experts: bool = False,
        enforce_eager: bool = False,
        compile_ahead: bool = True,
        kernel_cache: str | None = None,
        share_draws: Literal["auto", "on", "off"] = "auto",
        fixed_batch: int | None = None,
        drafts: Literal["off", "auto", "ngram", "schema", "earlier"] = "auto",
        draft_model: str | PathLike[str] | None = None,
        fold_order: Literal["sequential", "pairs", "tree"] = DEFAULT_FOLD_ORDER,
        row_layers: Literal["fold", "gather"] = "fold",
        leaves: int | None = None,
        kv_cache_dtype: Literal["auto", "fp8"] = "auto",
        experts: Literal["auto", "lanes", "columns"] = "auto",
        transport: Literal["auto", "gather", "peer", "mpi"] = "auto",
        logprobs_mode: LogprobsMode = RAW_LOGPROBS,
        approximate: bool = False,
        on_slowdown: None = None,
        max_slowdown: float = 0.3,
        step_timeout: float = 60.0,
        weights_timeout: float = 300.0,
        start_timeout: float = 300.0,
        **of_vllm: Any,
    ) -> None:
        given = {name: v for name, v in locals().items() if name not in ("self", "of_vllm")}
        self._load(*read_settings(given, of_vllm))

    __init__.__doc__ = __doc__

    def _load(self, config: EngineConfig, ranks: int) -> None:
        self.config = config
        refuse_faults()
        self.tokenizer: Tokenizer | None = None
        ahead: TokenizerAhead | None = None
        if not self.config.skip_tokenizer_init:
            names = self.config.tokenizer, self.config.model
            directory = resolve_tokenizer(*names, self.config.revision)
            template = self.config.chat_template, self.config.chat_template_date
            ahead = TokenizerAhead(directory, *template)
        self._followers = Followers(config, ranks) if ranks > 1 else None
        try:
            self.engine: Engine = self._start()
        except BaseException as error:
            if self._followers is not None:
                found = self._followers.explained(error)
                self._followers.kill()
                if found is not error:
                    raise found from error
            raise
        if ahead is not None:
            try:
                self.tokenizer = ahead.result()
            except BaseException:
                self._stop()
                raise
            self._shaped = HuggingFaceTokenizer(self.tokenizer)
        model, pooler = self.engine.model_config, self.engine.pooler
        self._reader = PromptReader(
            self.tokenizer,
            model.vocab_size,
            self.engine.max_model_len,
            ending_ids(model.eos_token_ids, self.tokenizer),
        )
        self._writer = ResultWriter(self.engine, self.tokenizer)
        if pooler is not None and pooler.pooling.answers == "tokens" and self.tokenizer:
            try:
                self._prompts.answering_tokens()
            except UsageError:
                self._stop()
                raise

    @classmethod
    def from_engine_args(cls, engine_args: Any, **of_vllm: Any) -> Self:
        """The model of an `EngineArgs`; other keywords are vLLM's and must ask for nothing."""
        return cls(**keywords_of(engine_args, of_vllm))

    def __getattr__(self, name: str) -> Any:
        remedy = METHODS.get(name)
        raise AttributeError(
            f"{type(self).__name__} has no {name}" + (f": {remedy}" if remedy else ""),
            name=name,
            obj=self,
        )

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""
        return self.engine.world.rank

    @property
    def system_fingerprint(self) -> str:
        """Names the contract, the weights and the architecture."""
        return self.engine.system_fingerprint

    def get_tokenizer(self) -> HuggingFaceTokenizer:
        """The tokenizer in the shape of Hugging Face's. Raises UsageError if there is none."""
        if self.tokenizer is None:
            raise UsageError(
                "there is no tokenizer: make the model without skip_tokenizer_init=True"
            )
        return self._shaped

    def get_default_sampling_params(self) -> SamplingParams:
        """New parameters with their defaults; those of generation_config.json are not read."""
        return SamplingParams()

    def record(
        self, outputs: Sequence[RequestOutput], sampling_params: Params = None
    ) -> list[RecordedAnswer]:
        """What `check` needs of answers; `sampling_params` are those of the call that gave them.

        Raises RequestError for an answer that is approximate, and for one that is pooled.
        """
        if any(not isinstance(output, RequestOutput) for output in outputs):
            raise RequestError(
                "answers of embed, classify, score and reward are not recorded: keep their digests",
                "outputs",
            )
        found, runner = [], self.engine.runner
        for output, given in zip(outputs, read_params(sampling_params, len(outputs)), strict=True):
            params = self._reader.resolved(given, len(output.prompt_token_ids))
            found.append(
                recorded_answer(output, params, runner.contracts.strict, runner.model_digest)
            )
        return found

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether it no longer answers requests."""

    def __repr__(self) -> str:
        engine = self.engine
        dtype = engine.model_config.dtype
        return (
            f"{type(self).__name__}({self.config.model!r}, "
            f"tensor_parallel_size={engine.world.size}, "
            f"dtype={dtype!r}, device={engine.runner.device.type!r}, "
            f"max_model_len={engine.max_model_len})" + (" [closed]" if self.closed else "")
        )

    def _request(
        self, prompt: ReadPrompt, params: SamplingParams, expected: Predictions, request_id: str
    ) -> Request:
        """The checked request of a prompt; a schema is not tried yet. Raises RequestError."""
        request = self._reader.request(prompt, params, request_id, expected)
        check_drafts(request, self.config.fixed_batch, self.engine.approximate)
        RequestAssembler(request, self.tokenizer)
        return request

    def _recorded(self, answers: Sequence[RecordedAnswer]) -> list[Asked]:
        """What computes recorded answers again. Raises as `check`."""
        runner = self.engine.runner
        refuse_unverified(self.config.fixed_batch, self.engine.approximate)
        if not isinstance(answers, list | tuple):
            raise UsageError(
                f"answers is a {type(answers).__name__}: give a list of what record made"
            )
        for place, answer in enumerate(answers):
            if not isinstance(answer, RecordedAnswer):
                raise UsageError(
                    f"answers[{place}] is a {type(answer).__name__}: give what record made"
                )
            check_recorded(
                answer,
                f"answers[{place}]",
                runner.contracts.strict,
                runner.model_digest,
                self.engine.model_config.vocab_size,
                self.config.logprobs_mode,
            )
        return [
            (
                ReadPrompt(answer.prompt_token_ids),
                checked_params(answer),
                Predictions(tuple(choice.token_ids for choice in answer.outputs)),
            )
            for answer in answers
        ]

    @abstractmethod
    def _start(self) -> "Engine":
        """Make the engine."""

    @abstractmethod
    def _stop(self) -> None:
        """Close the engine, which had no request yet."""


def open_engine(config: EngineConfig, streams: bool, followers: Followers | None) -> "Engine":
    """The engine over `followers`, or over the ranks of this process's launcher.

    streams: whether readers get tokens one by one, as for `Engine`.
    """
    with no_garbage():  # torch is imported here, not before
        from tpdet.engine import Engine
    with own_arithmetic():
        if followers is None:
            world, secret = open_ranks(config, read_environment()), given_secret()
        else:
            environment, check = followers.environment, followers.check
            world, secret = open_ranks(config, environment, check), followers.secret
            followers.met()
        return Engine(config, world, secret=secret, streams=streams)


def open_ranks(
    config: EngineConfig, environment: RankEnvironment, watch: Callable[[], None] | None = None
) -> "World":
    """The world of `environment`; `watch` is called while ranks are waited for, and may raise."""
    with no_garbage():
        from tpdet.comm.device import open_world
    return open_world(
        config.device,
        config.step_timeout,
        environment,
        transport=config.transport,
        start_timeout=config.start_timeout,
        watch=watch,
    )


def keywords_of(engine_args: Any, of_vllm: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in an `EngineArgs`. Raises UsageError for another object, RequestError for a
    keyword that asks for something.
    """
    if not dataclasses.is_dataclass(engine_args) or isinstance(engine_args, type):
        raise UsageError(f"engine_args is a {type(engine_args).__name__}: give EngineArgs(...)")
    refuse_what_asks("from_engine_args", of_vllm, ("engine_args",))
    return dataclasses.asdict(engine_args)


def use_device(engine: "Engine") -> None:
    """Make the engine's GPU the current device of this thread; torch keeps one for each thread."""
    device = engine.runner.device
    if device.type == "cuda":
        import torch

        torch.cuda.set_device(device)
