"""The offline API: `LLM(...).generate(...)`, alone or as every rank of a torchrun job."""

import sys
from collections.abc import Sequence
from typing import Any, cast

import blake3
import msgspec
from tqdm import tqdm

from tpdet.comm.device import open_world
from tpdet.comm.world import World
from tpdet.config import EngineConfig
from tpdet.engine import Engine
from tpdet.errors import DisagreementError, NumericalError, RequestError, UsageError
from tpdet.grammar import trial
from tpdet.launch.faults import refuse_faults
from tpdet.launch.run_secret import given_secret
from tpdet.outputs import ChoiceAnswer, RequestAnswer, RequestAssembler, logprob_bits
from tpdet.replay import replay_digest
from tpdet.request import Request, SamplingParams, TokenOutput, check_against_model
from tpdet.sampling_row import SampledToken
from tpdet.tokenizer import Tokenizer
from tpdet.weights.resolve import resolve_tokenizer

Prompt = str | Sequence[int]

_CALL_TIMEOUT = 1800.0  # seconds ranks may be apart between two calls of generate


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of one prompt.

    `logprobs`, if asked for, has one `{token_id: logprob}` a position: the chosen token first, then
    the likeliest. `logprob_bits` has the chosen tokens' fp32 as hex, always.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: list[dict[int, float]] | None
    logprob_bits: tuple[str, ...]
    finish_reason: str
    stop_reason: str | int | None


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one prompt; `prompt_logprobs` has None for the first token.

    `replay_digest` is docs/replay.md's, the one a server gives for the same request; None for an
    approximate answer, which cannot be replayed.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: list[dict[int, float] | None] | None
    outputs: tuple[CompletionOutput, ...]
    seed: int
    system_fingerprint: str
    replay_digest: str | None


_outputs_decoder = msgspec.msgpack.Decoder(list[RequestOutput])


class LLM:
    """A model for offline use; the tensor-parallel size is the world's size.

    Under torchrun every rank makes the same calls and gets the same results. Keyword arguments are
    those of `tpdet.config.EngineConfig`. On the CPU torch's own threads are set to one: the engine
    runs its own. Raises UsageError, NotFoundError or CheckpointError before anything is served.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        self.config = EngineConfig.from_values(model=model, **settings)
        if self.config.on_slowdown is not None:
            raise UsageError("on_slowdown is a server's setting: leave it out, or set approximate")
        refuse_faults()
        secret = given_secret()
        self._world: World = open_world(
            self.config.device,
            self.config.step_timeout,
            transport=self.config.transport,
            start_timeout=self.config.start_timeout,
        )
        self.engine = Engine(self.config, self._world, secret=secret)
        self.tokenizer: Tokenizer | None = None
        if not self.config.skip_tokenizer_init:
            names = self.config.tokenizer, self.config.model
            directory = resolve_tokenizer(*names, self.config.revision)
            self.tokenizer = Tokenizer.load(directory, self.config.chat_template)
        self._calls = 0

    @property
    def system_fingerprint(self) -> str:
        """Names contract, model and architecture."""
        return self.engine.system_fingerprint

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer every prompt (text or token ids); results come in the prompts' order.

        Everything is checked before anything runs: RequestError names the field. Raises
        NumericalError when the model gave NaN for a prompt.
        """
        texts, requests = self._requests(prompts, sampling_params)
        self._agree_on(requests)
        if self._world.rank > 0:
            self.engine.worker_loop()
            return _outputs_decoder.decode(self.engine.control.broadcast(None))
        try:
            outputs = self._run(texts, requests, use_tqdm)
        finally:
            self.engine.stop_workers()
        self.engine.control.broadcast(msgspec.msgpack.encode(outputs))
        return outputs

    def close(self) -> None:
        """Leave the world; all ranks together."""
        self.engine.close()

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> tuple[list[str | None], list[Request]]:
        """Tokenised, checked requests, and the texts of those that were text."""
        prompts = _as_list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts but {len(sampling_params)} sampling_params: give one for "
                "all, or one each",
                "sampling_params",
            )
        call, self._calls = self._calls, self._calls + 1
        texts: list[str | None] = []
        requests = []
        for index, (prompt, params) in enumerate(zip(prompts, sampling_params, strict=True)):
            texts.append(prompt if isinstance(prompt, str) else None)
            request = Request(
                request_id=f"llm-{call}-{index}",
                prompt_token_ids=self._token_ids(prompt),
                params=params,
                eos_token_ids=self._eos_token_ids,
            )
            config = self.engine.model_config
            check_against_model(request, config.vocab_size, self.engine.max_model_len)
            RequestAssembler(request, self.tokenizer)
            if params.json_schema is not None:
                trial.check(params.json_schema)
                self.engine.grammars.constrain(params.json_schema)
            requests.append(request)
        return texts, requests

    @property
    def _eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence: the model's and the tokenizer's."""
        more = self.tokenizer.eos_token_ids if self.tokenizer is not None else ()
        return tuple(sorted({*self.engine.model_config.eos_token_ids, *more}))

    def _token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return tuple(prompt)
        if self.tokenizer is None:
            raise RequestError("a text prompt needs a tokenizer: pass token ids", "prompt")
        return tuple(self.tokenizer.encode(prompt))

    def _agree_on(self, requests: list[Request]) -> None:
        """Every rank must ask the same; raises DisagreementError on all of them otherwise."""
        self._world.set_timeout(_CALL_TIMEOUT)
        digest = blake3.blake3(msgspec.msgpack.encode(requests)).digest()
        digests = self._world.gather_bytes(digest)
        self._world.set_timeout(self.config.step_timeout)
        for rank, other in enumerate(digests):
            if other != digests[0]:
                raise DisagreementError(
                    f"rank {rank} called generate with other prompts or parameters than rank 0: "
                    "make the same call on every rank"
                )

    def _run(
        self, texts: list[str | None], requests: list[Request], use_tqdm: bool
    ) -> list[RequestOutput]:
        """Rank 0's loop: feed the queue, step, assemble."""
        assemblers = {r.request_id: RequestAssembler(r, self.tokenizer) for r in requests}
        seeds: dict[str, int] = {}
        waiting = list(reversed(requests))
        silent = not (use_tqdm and sys.stderr.isatty())
        finished = 0
        with tqdm(total=len(requests), desc="prompts", disable=silent) as bar:
            while waiting or self.engine.has_work:
                while waiting and len(seeds) - finished < self.config.max_queue:
                    request = waiting.pop()
                    seeds[request.request_id] = self.engine.submit(request)
                for output in self.engine.step():
                    assembler = assemblers[output.request_id]
                    if assembler.finished:
                        continue
                    delta = assembler.push(output)
                    if delta is not None and delta.abort and isinstance(output, TokenOutput):
                        self.engine.abort(output.request_id, output.choice)
                    if assembler.finished:
                        finished += 1
                        bar.update()
        for request in requests:
            failure = assemblers[request.request_id].failure
            if failure is not None and failure.code == RequestError.code:
                raise RequestError(f"prompt {request.request_id}: {failure.message}")
            if failure is not None:
                raise NumericalError(f"prompt {request.request_id}: {failure.message}")
        return [
            _output(text, assemblers[r.request_id].answer(), seeds[r.request_id], self.engine)
            for text, r in zip(texts, requests, strict=True)
        ]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (text or ids) as a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))


def _output(text: str | None, answer: RequestAnswer, seed: int, engine: Engine) -> RequestOutput:
    prompt_logprobs = None
    if answer.prompt is not None and answer.request.params.prompt_logprobs is not None:
        ids = answer.request.prompt_token_ids
        prompt_logprobs = [
            None if logprob is None else _position(SampledToken(token, logprob, top, rank))
            for token, logprob, top, rank in zip(
                ids, answer.prompt.logprobs, answer.prompt.top, answer.prompt.ranks, strict=True
            )
        ]
    return RequestOutput(
        prompt=text,
        prompt_token_ids=answer.request.prompt_token_ids,
        prompt_logprobs=prompt_logprobs,
        outputs=tuple(_completion(choice, answer.request.params) for choice in answer.choices),
        seed=seed,
        system_fingerprint=engine.runner.fingerprint(answer.approximate),
        replay_digest=None
        if answer.approximate
        else replay_digest(
            [answer.request],
            [[choice.logprobs for choice in answer.choices]],
            seed,
            engine.runner.contract,
            engine.runner.model_digest,
        ),
    )


def _completion(choice: ChoiceAnswer, params: SamplingParams) -> CompletionOutput:
    return CompletionOutput(
        index=choice.index,
        text=choice.text,
        token_ids=choice.token_ids,
        logprobs=None if params.logprobs is None else [_position(t) for t in choice.logprobs],
        logprob_bits=tuple(logprob_bits(token.logprob) for token in choice.logprobs),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
    )


def _position(token: SampledToken) -> dict[int, float]:
    """The chosen token first, then the likeliest, best first."""
    return {token.token_id: token.logprob} | {c.token_id: c.logprob for c in token.top}
