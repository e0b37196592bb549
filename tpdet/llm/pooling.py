"""Vectors, labels, scores and rewards of prompts: `LLM.embed` and its like, shaped like vLLM's."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from tpdet.audit.pooled import PooledAssembler
from tpdet.errors import RequestError, UsageError
from tpdet.llm.call import UseTqdm
from tpdet.llm.prompts import PromptReader, are_ids, listed, params_of_each, shown
from tpdet.llm.ranks import CallRequests
from tpdet.llm.results import PooledResult
from tpdet.llm.vllm_keywords import refuse_what_asks
from tpdet.requests.pooling_params import NOT_POOLED, PoolingParams
from tpdet.requests.request import Request
from tpdet.text.pooled_prompts import PooledPrompts, naming, paired

if TYPE_CHECKING:
    from tpdet.engine import Engine

Params = PoolingParams | Sequence[PoolingParams] | None
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A vector of fp32 values."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many values it has."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """A number for each label: probabilities, unless `use_activation` was False."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """How many labels there are."""
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How well a document fits a query."""

    score: float


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """A tensor fp32 [labels]: the score head's own values."""

    data: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRequestOutput(Generic[Answer]):
    """The answer to one prompt.

    system_fingerprint: names the contract, the weights and the architecture. digest: BLAKE3 (hex)
    over the request, what computed it and the bits of its answer; of a score of two vectors None.
    """

    request_id: str
    outputs: Answer
    prompt_token_ids: tuple[int, ...]
    num_cached_tokens: int = 0
    finished: bool = True
    system_fingerprint: str = ""
    digest: str | None = None


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]


class PooledPlan(NamedTuple):
    """What a call does: its prompts' ids, how they are pooled, and what results become."""

    read: Callable[[], list[tuple[int, ...]]]
    params: Params
    shape: Callable[[list[PooledResult]], list[Any]]


class PoolingPlans:
    """Plans of the calls of a model that pools; on one that generates they raise UsageError."""

    engine: "Engine"
    _reader: PromptReader

    @property
    def _prompts(self) -> PooledPrompts:
        """What makes prompts of texts that are pooled; of a model that pools."""
        reader, pooler = self._reader, self.engine.pooler
        assert pooler is not None
        return PooledPrompts(
            reader.tokenizer, pooler.pooling, reader.vocab_size, reader.max_model_len
        )

    def _embedding(
        self, prompts: Any, truncate: int | None, params: Params, prompt_name: str | None
    ) -> PooledPlan:
        """The plan of `embed`."""
        self._need("embed", "vector")
        read = partial(self._texts, prompts, prompt_name, truncate)
        return _plan(read, params, lambda result: EmbeddingOutput(result.numbers))

    def _classification(self, prompts: Any, truncate: int | None, params: Params) -> PooledPlan:
        """The plan of `classify`."""
        self._need("classify", "labels")
        read = partial(self._texts, prompts, None, truncate)
        return _plan(read, params, lambda result: ClassificationOutput(result.numbers))

    def _rewarding(self, prompts: Any, truncate: int | None, params: Params) -> PooledPlan:
        """The plan of `reward`."""
        import torch

        self._need("reward", "labels")
        read = partial(self._texts, prompts, None, truncate)
        params = PoolingParams(use_activation=False) if params is None else params
        return _plan(
            read,
            params,
            lambda result: PoolingOutput(torch.tensor(result.numbers, dtype=torch.float32)),
        )

    def _scoring(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        truncate: int | None,
        params: PoolingParams | None,
        instruction: str | None,
    ) -> PooledPlan:
        """The plan of `score`."""
        pooling = self._need("score", "vector", "labels", "tokens")
        pairs = paired(data_1, data_2, ("data_1", "data_2"))
        (asked,) = params_of_each("pooling_params", PoolingParams, params, 1)
        if pooling.answers == "vector":
            if instruction is not None:
                raise RequestError("this model reads no instruction: leave it out", "instruction")
            texts = list(dict.fromkeys(text for pair in pairs for text in pair))
            asked = PoolingParams(dimensions=asked.dimensions, use_activation=True)
            read = partial(self._texts, texts, None, truncate)
            return PooledPlan(read, asked, partial(_cosines, pairs, texts))
        if pooling.width != 1:
            raise UsageError(f"score needs a head of one label, this model has {pooling.width}")
        reader = self._prompts
        if pooling.answers == "tokens":
            ids = reader.answering_tokens()
            asked = PoolingParams(use_activation=asked.use_activation, token_ids=ids)
        read = partial(reader.pairs, pairs, truncate, instruction)
        return _plan(read, asked, lambda result: ScoringOutput(result.numbers[0]))

    def _pooled_requests(self, plan: PooledPlan, name: str) -> list[Request]:
        """The checked requests of a plan, named `name` and their number. Raises RequestError."""
        prompts, reader, pooler = plan.read(), self._prompts, self.engine.pooler
        assert pooler is not None
        every = params_of_each("pooling_params", PoolingParams, plan.params, len(prompts))
        return [
            pooler.resolved(reader.request(ids, one, f"{name}-{index}"))
            for index, (ids, one) in enumerate(zip(prompts, every, strict=True))
        ]

    def _need(self, call: str, *answers: str) -> Any:
        """How the model pools. Raises UsageError where it gives none of these answers."""
        pooler = self.engine.pooler
        if pooler is None:
            raise UsageError(NOT_POOLED)
        if pooler.pooling.answers not in answers:
            raise UsageError(
                f"{call} is not for this model (task {pooler.pooling.task}): use "
                f"{_CALLS[pooler.pooling.answers]}"
            )
        return pooler.pooling

    def _texts(
        self, prompts: Any, prompt_name: str | None, truncate: int | None
    ) -> list[tuple[int, ...]]:
        """The ids of prompts in every form that `generate` takes."""
        prompts, reader = listed(prompts), self._prompts
        if isinstance(prompts, str | Mapping) or are_ids(prompts):
            prompts = [prompts]
        if not isinstance(prompts, list | tuple):
            raise RequestError(f"prompts is {shown(prompts)}: give a text or a list", "prompts")
        every = []
        for index, prompt in enumerate(prompts):
            text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
            if isinstance(prompt, Mapping) and prompt.get("prompt_token_ids") is not None:
                text = listed(prompt["prompt_token_ids"])
            with naming(index, prompts):
                if isinstance(text, str):
                    every.append(reader.text(text, prompt_name, truncate))
                else:
                    read = self._reader.prompt(text, f"prompts[{index}]")
                    every.append(reader.ids(read.token_ids, prompt_name, truncate))
        return every


class PoolingCalls(PoolingPlans):
    """The calls of an `LLM` whose model pools."""

    _calls: int
    _answer: Callable[..., list[Any]]

    def embed(
        self,
        prompts: Any,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        pooling_params: Params = None,
        prompt_name: str | None = None,
        **of_vllm: Any,
    ) -> list[EmbeddingRequestOutput]:
        """The vector of each prompt, in the prompts' order.

        prompts: as for `generate`. truncate_prompt_tokens: how many tokens of a longer text are
        kept, -1 for the context; None refuses it. pooling_params: one for all, or one each.
        prompt_name: of a sentence-transformers folder's prompts, put before each text.

        Raises RequestError naming the prompt or the parameter, NumericalError for NaN and for
        zeros that have no direction, UsageError on a model that gives no vectors.
        """
        refuse_what_asks("embed", of_vllm, ("pooling_params", "prompt_name"))
        plan = self._embedding(prompts, truncate_prompt_tokens, pooling_params, prompt_name)
        return self._pooled(plan, use_tqdm)

    def classify(
        self,
        prompts: Any,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        pooling_params: Params = None,
        **of_vllm: Any,
    ) -> list[ClassificationRequestOutput]:
        """The labels' probabilities of each prompt. Arguments and errors as of `embed`."""
        refuse_what_asks("classify", of_vllm, ("pooling_params",))
        plan = self._classification(prompts, truncate_prompt_tokens, pooling_params)
        return self._pooled(plan, use_tqdm)

    def reward(
        self,
        prompts: Any,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        pooling_params: Params = None,
        **of_vllm: Any,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The score head's own values at each last token. Arguments and errors as of `embed`."""
        refuse_what_asks("reward", of_vllm, ("pooling_params",))
        plan = self._rewarding(prompts, truncate_prompt_tokens, pooling_params)
        return self._pooled(plan, use_tqdm)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | None = None,
        instruction: str | None = None,
        **of_vllm: Any,
    ) -> list[ScoringRequestOutput]:
        """A score of each pair of texts: one with each of `data_2`, or pair by pair.

        A model with a score head of one label, or one that answers yes or no, reads both texts at
        once; of a model that embeds it is the cosine of the two vectors. instruction: of a model
        that answers yes or no. Other arguments and errors as of `embed`.
        """
        refuse_what_asks("score", of_vllm, ("pooling_params", "instruction"))
        options = truncate_prompt_tokens, pooling_params, instruction
        return self._pooled(self._scoring(data_1, data_2, *options), use_tqdm)

    def _pooled(self, plan: PooledPlan, use_tqdm: UseTqdm) -> list[Any]:
        def make() -> CallRequests:
            requests = self._pooled_requests(plan, f"llm-{self._calls}")
            return CallRequests(list(map(PooledAssembler, requests)), [None] * len(requests))

        return plan.shape(self._answer(make, use_tqdm))


_CALLS = {"vector": "embed or score", "labels": "classify, reward or score", "tokens": "score"}


def _plan(
    read: Callable[[], list[tuple[int, ...]]],
    params: Params,
    output: Callable[[PooledResult], Any],
) -> PooledPlan:
    """The plan of a call that answers each prompt by itself."""

    def shape(results: list[PooledResult]) -> list[PoolingRequestOutput[Any]]:
        return [_shaped(result, output(result)) for result in results]

    return PooledPlan(read, params, shape)


def _cosines(
    pairs: list[tuple[str, str]], texts: list[str], results: list[PooledResult]
) -> list[ScoringRequestOutput]:
    """A score of each pair, by the vector of each text."""
    import torch

    from tpdet.kernels.exact.pooling import similarity

    by_text = dict(zip(texts, results, strict=True))
    rows = {text: torch.tensor(result.numbers) for text, result in by_text.items()}
    return [
        PoolingRequestOutput(
            request_id=by_text[b].request_id,
            outputs=ScoringOutput(float(similarity(rows[a], rows[b]))),
            prompt_token_ids=by_text[a].prompt_token_ids + by_text[b].prompt_token_ids,
            num_cached_tokens=by_text[b].cached_tokens,
            system_fingerprint=by_text[b].system_fingerprint,
        )
        for a, b in pairs
    ]


def _shaped(result: PooledResult, outputs: Answer) -> PoolingRequestOutput[Answer]:
    return PoolingRequestOutput(
        request_id=result.request_id,
        outputs=outputs,
        prompt_token_ids=result.prompt_token_ids,
        num_cached_tokens=result.cached_tokens,
        system_fingerprint=result.system_fingerprint,
        digest=result.digest,
    )
