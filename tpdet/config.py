"""The engine's configuration: one frozen object, from flags, a TOML file or keyword arguments.

Names follow `vllm serve` where it has one. Unknown keys are an error; values are checked here,
before a model is opened.
"""

import datetime
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from tpdet.arguments.dates import date_of
from tpdet.arguments.suggestions import did_you_mean
from tpdet.arguments.vllm_arguments import DTYPES, parse_size
from tpdet.errors import UsageError
from tpdet.kernels.inputs.product import HEAD_ROWS
from tpdet.kernels.order import DEFAULT_FOLD_ORDER
from tpdet.requests.engine_facts import PROCESSED_LOGPROBS, RAW_LOGPROBS, LogprobsMode, SeedPolicy
from tpdet.requests.field_ranges import SEED

APPROXIMATE = "approximate"
"""The name of stock arithmetic in settings, results and messages."""


def _long_dtype(value: object) -> object:
    """The dtype for a short name; anything else unchanged."""
    return DTYPES.get(value, value) if isinstance(value, str) else value


def _whole_size(value: object) -> object:
    """The number for a text such as 2k; anything else unchanged."""
    suffixed = isinstance(value, str) and value.strip()[-1:].isalpha()
    return parse_size(str(value)) if suffixed else value


def _real_date(value: object) -> object:
    """The text of a date, which TOML may give as a date; any other text is refused."""
    if type(value) is datetime.date:  # not a date with a time
        return value.isoformat()
    if isinstance(value, str) and date_of(value) is None:
        raise ValueError(f"{value!r} is no date: write one such as 2026-01-31")
    return value


_DRAFTERS = {
    "off": (), "auto": ("schema", "ngram"), "ngram": ("ngram",), "schema": ("schema",),
    "earlier": ("earlier", "schema", "ngram"),
}  # fmt: skip
Dtype = Annotated[Literal["auto", "float32", "bfloat16", "float16"], BeforeValidator(_long_dtype)]
Size = Annotated[int, BeforeValidator(_whole_size)]
"""A whole number; the texts 2k (2,000) and 2K (2,048) stand for one."""
Model = TypeVar("Model", bound=BaseModel)

MOST_LEAVES = 64
MOST_SEQUENCES = 4096
MOST_STEP_TOKENS = 1 << 20
MOST_KV_PAGES = 1 << 24
LONGEST_STEP_SECONDS = 3600.0
LONGEST_START_SECONDS = 86400.0
"""The largest values of settings; those past them are mistakes."""


class EngineConfig(BaseModel):
    """All settings of an engine. `from_values` raises UsageError naming field and value."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), strict=True)

    model: str = Field(
        description="Hugging Face directory, GGUF file, or a hub name when there is a network"
    )
    revision: str | None = Field(None, description="hub revision")
    tokenizer: str | None = Field(None, description="tokenizer directory; the model's by default")
    skip_tokenizer_init: bool = Field(False, description="serve token ids only")
    chat_template: str | None = Field(None, description="file with a Jinja chat template")
    chat_template_date: Annotated[str, BeforeValidator(_real_date)] | None = Field(
        None,
        description="date that a chat template prints which calls strftime_now (of gpt-oss, for "
        "example), where a request has no current_date in its chat_template_kwargs",
    )
    load_format: Literal["auto", "safetensors", "dummy"] = Field(
        "auto", description="dummy makes random weights from the seed"
    )
    task: Literal["auto", "generate", "embed", "classify", "score", "reward"] = Field(
        "auto",
        description="what the model answers: text, vectors, labels, scores of pairs, or rewards; "
        "auto: what the checkpoint's head is for, and vectors of a sentence-transformers folder",
    )
    dtype: Dtype = Field(
        "auto",
        description="dtype of weights and activations; auto takes the checkpoint's; half, fp16, "
        "bf16, float and fp32 are short names",
    )
    weights: Literal["auto", "packed", "dense"] = Field(
        "auto",
        description="how quantised weights lie in memory; packed: as they are stored, a tile is "
        "unpacked when it is used, on CPUs and on Hopper; dense: dequantised when they are "
        "loaded; auto: so far dense; no bit depends on it",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        "auto",
        description="how pages hold keys and values; auto: in the model's dtype; fp8: in e4m3 with "
        "a power of two for each token and key head; part of the contract id",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the model runs")
    transport: Literal["auto", "gather", "peer", "mpi"] = Field(
        "auto",
        description="what carries partial sums between ranks; peer: GPU to GPU, inside a host; "
        "mpi: the MPI whose mpirun started the ranks",
    )
    fold_order: Literal["sequential", "pairs", "tree"] = Field(
        DEFAULT_FOLD_ORDER,
        description="order in which leaf sums are added; part of the contract id",
    )
    row_layers: Literal["fold", "gather"] = Field(
        "fold",
        description="fold: leaf sums of attention output and down products are added over ranks; "
        "gather: ranks exchange their columns and add nothing; part of the contract id",
    )
    leaves: int | None = Field(
        None,
        ge=1,
        le=MOST_LEAVES,
        description="leaves of a row layer (a power of two); 8 by default; part of the contract id",
    )
    experts: Literal["auto", "lanes", "columns"] = Field(
        "auto",
        description="where the experts of a mixture lie; lanes: whole experts on ranks; columns: "
        "every expert cut over its outputs on all ranks; auto: what reads less at one row; no bit "
        "depends on it",
    )
    max_model_len: Size | None = Field(
        None, ge=1, description="context length; the model's if unset"
    )
    max_num_seqs: Size = Field(
        256, ge=1, le=MOST_SEQUENCES, description="sequences in one step, at most"
    )
    fixed_batch: int | None = Field(
        None,
        ge=1,
        le=HEAD_ROWS,
        description="rows of every decode step, padded, and sequences at a time, at most",
    )
    max_num_batched_tokens: Size | None = Field(
        None,
        ge=1,
        le=MOST_STEP_TOKENS,
        description="tokens in one step, at most (default: 2048 on a CPU; 8192 on a GPU, on Hopper "
        "GPUs of 132 multiprocessors 8448 at TP 1 and 7168 at TP 2, or fewer for the sake of the "
        "KV cache, and while others decode as few as read prompts nearly as fast)",
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0.0, le=1.0, description="share of the GPU's memory the engine may use"
    )
    enforce_eager: bool = Field(False, description="launch kernels one by one, without CUDA graphs")
    compile_ahead: bool = Field(
        True, description="compile the kernels of a start side by side, shared by a host's ranks"
    )
    kernel_cache: str | None = Field(
        None, description="directory of kernels that tpdet compile made; a GPU's start reads them"
    )
    share_draws: Literal["auto", "on", "off"] = Field(
        "auto",
        description="ranks sample a step's tokens together: with top-k or top-p each for its "
        "share of the rows, else each over its part of the vocabulary; auto: over peer memory "
        "only; off: rank 0 samples them",
    )
    drafts: Literal["off", "auto", "ngram", "schema", "earlier"] = Field(
        "auto",
        description="who proposes tokens that are verified together, which changes no bit: n-grams "
        "of a sequence's own tokens, tokens that a schema forces, or both and the request's "
        "prediction (auto); earlier: also outputs of the same prompt and salts; off: nobody, and "
        "predictions are left out",
    )
    draft_model: str | None = Field(
        None,
        description="directory of a second, small model with the same tokenizer, whose tokens are "
        "drafts; it runs on rank 0's device",
    )
    kv_pages: Size | None = Field(
        None,
        ge=1,
        le=MOST_KV_PAGES,
        description="256-token pages of KV cache; from free memory if unset",
    )
    enable_prefix_caching: bool = Field(True, description="share KV pages of equal prefixes")
    enable_return_routed_experts: bool = Field(
        False,
        description="answers hold the experts that each token chose; prefixes are then not shared",
    )
    logprobs_mode: LogprobsMode = Field(
        RAW_LOGPROBS,
        description="which log-probabilities answers have of sampled tokens: those of the model's "
        "own logits, or of what is sampled from, after bias, penalties, temperature and filters; "
        "those of prompts are raw",
    )
    approximate: bool = Field(
        False,
        description="compute by the library's products, attention and all-reduce: answers are not "
        "deterministic, and say so",
    )
    on_slowdown: Literal["approximate"] | None = Field(
        None, description="change to approximate answers, for good, when decoding gets too slow"
    )
    max_slowdown: float = Field(
        0.3, gt=0.0, lt=1.0, description="share of the speed measured at start that may be lost"
    )
    seed_policy: SeedPolicy = Field(
        "random",
        description="seed of a request without one; random: the next of the stream that --seed "
        "starts; request: a function of its prompt and parameters, so that equal requests have "
        "equal answers",
    )
    seed: int = Field(
        0, ge=SEED.low, le=SEED.high, description="key of the server's own seed stream"
    )
    step_timeout: float = Field(
        60.0,
        gt=0.0,
        le=LONGEST_STEP_SECONDS,
        description="seconds after which a silent rank counts as lost",
    )
    weights_timeout: float = Field(
        300.0,
        gt=0.0,
        le=LONGEST_STEP_SECONDS,
        description="seconds after which the silent sender of a weight update counts as lost",
    )
    start_timeout: float = Field(
        300.0,
        gt=0.0,
        le=LONGEST_START_SECONDS,
        description="seconds within which all ranks must have arrived",
    )
    max_queue: Size = Field(
        1024, ge=1, description="waiting requests, at most; a call for more texts is refused"
    )

    @model_validator(mode="after")
    def _refuse_what_does_not_fit(self) -> "EngineConfig":
        if self.leaves is not None and self.leaves & (self.leaves - 1):
            raise ValueError(f"{{leaves}} {self.leaves} is not a power of two")
        if self.approximate and self.on_slowdown is not None:
            raise ValueError("{approximate} and {on_slowdown} exclude each other: give one")
        if self.may_be_approximate and self.task not in ("auto", "generate"):
            raise ValueError("{task} " + self.task + " has no approximate mode: leave it out")
        if self.may_be_approximate and self.row_layers != "fold":
            raise ValueError("approximate answers need {row_layers} fold: leave {row_layers} out")
        if self.weights == "packed" and self.may_be_approximate:
            raise ValueError("{weights} packed has no approximate mode: leave {weights} out")
        if self.kv_cache_dtype != "auto" and self.may_be_approximate:
            raise ValueError(
                "{kv_cache_dtype} fp8 has no approximate mode: leave {kv_cache_dtype} out"
            )
        return self

    @model_validator(mode="after")
    def _refuse_drafters_where_rows_are_fixed(self) -> "EngineConfig":
        if self.drafts not in ("off", "auto") and (self.fixed_batch or self.approximate):
            why = "{fixed_batch}" if self.fixed_batch else "{approximate}"
            raise ValueError(
                f"{{drafts}} {self.drafts} and {why} exclude each other: leave one out"
            )
        if self.draft_model is not None and not self.drafters:
            why = next(
                name
                for name, given in (
                    ("{fixed_batch}", self.fixed_batch),
                    ("{approximate}", self.approximate),
                    ("{drafts} off", True),
                )
                if given
            )
            raise ValueError(f"{{draft_model}} and {why} exclude each other: leave one out")
        return self

    @model_validator(mode="after")
    def _refuse_a_fixed_batch_that_never_fills(self) -> "EngineConfig":
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            limit = getattr(self, name)
            if None not in (self.fixed_batch, limit) and self.fixed_batch > limit:
                raise ValueError(
                    f"{{fixed_batch}} {self.fixed_batch} is over {{{name}}} {limit}: lower the one "
                    "or raise the other"
                )
        return self

    @property
    def max_running(self) -> int:
        """How many sequences run at a time, at most."""
        return self.fixed_batch or self.max_num_seqs

    @property
    def drafters(self) -> tuple[str, ...]:
        """The engine's drafters; none where a step's rows are fixed or reach the bits."""
        if self.fixed_batch or self.approximate:
            return ()
        own = () if self.draft_model is None or self.drafts == "off" else ("draft_model",)
        return _DRAFTERS[self.drafts] + own

    @property
    def processes_logprobs(self) -> bool:
        """Whether log-probabilities of sampled tokens are of what they are sampled from."""
        return self.logprobs_mode == PROCESSED_LOGPROBS

    @property
    def may_be_approximate(self) -> bool:
        """Whether answers may be approximate, from the start or after a slowdown."""
        return self.approximate or self.on_slowdown is not None

    @classmethod
    def from_values(cls, **values: object) -> "EngineConfig":
        """The configuration of keyword arguments. Raises UsageError for the first wrong field."""
        return validated(cls, values)


def validated(
    model: type[Model], values: Mapping[str, object], spell: Callable[[str], str] = str
) -> Model:
    """A `model` of these values. Text is no number, except for a size with a suffix.

    spell: turns a field's name into the user's spelling. Raises UsageError for the first problem,
    with setting, value and remedy.
    """
    try:
        return model(**values)
    except ValidationError as error:
        raise UsageError(first_problem(error, spell, model.model_fields)) from None


def first_problem(
    error: ValidationError, spell: Callable[[str], str] = str, known: Iterable[str] = ()
) -> str:
    """One line for the first problem that pydantic found: setting, value and remedy.

    spell: turns a field's name into the user's spelling; messages of our validators have names in
    braces for it. known: names to suggest instead of an unknown one.
    """
    problem = error.errors(include_url=False)[0]
    kind, value = problem["type"], problem["input"]
    if not problem["loc"]:
        message = problem["msg"].removeprefix("Value error, ")
        return re.sub(r"\{(\w+)\}", lambda found: spell(found[1]), message)
    field = str(problem["loc"][0])
    if kind == "extra_forbidden":
        return f"unknown setting {field!r}{did_you_mean(field, known)}"
    if kind == "missing":
        return f"{spell(field)} is missing"
    return f"{spell(field)}: {_what_is_wrong(kind, value, problem)}"


def _what_is_wrong(kind: str, value: object, problem: Any) -> str:
    context = problem.get("ctx", {})
    if kind in _TYPES:
        said = _TYPES[kind]
        quoted = isinstance(value, str) and re.fullmatch(_PLAIN.get(said, "$^"), value, re.ASCII)
        return f"{value!r} is not {said}{': write it without quotes' if quoted else ''}"
    if kind == "literal_error":
        choices = problem["ctx"]["expected"].replace("'", "").replace(" or ", ", ")
        known = [*choices.split(", "), *(DTYPES if "float32" in choices else ())]
        return f"{value!r} is none of {choices}{did_you_mean(str(value), known)}"
    for name, words in _BOUNDS.items():
        if name in context:
            return f"{value} is out of range: use {words.format(context[name])}"
    return f"{problem['msg'].removeprefix('Value error, ')}"


_PLAIN = {
    "a whole number": r"[+-]?[0-9]+", "a number": r"[+-]?[0-9.]+", "true or false": "true|false",
}  # fmt: skip
_TYPES = {
    "int_type": "a whole number", "int_parsing": "a whole number", "int_from_float":
    "a whole number", "float_type": "a number", "float_parsing": "a number",
    "bool_type": "true or false", "bool_parsing": "true or false", "string_type": "text",
}  # fmt: skip
_BOUNDS = {"ge": "{} or more", "le": "at most {}", "gt": "more than {}", "lt": "less than {}"}
