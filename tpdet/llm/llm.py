"""`LLM`: answers lists of prompts, all answers of a call at once."""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from tpdet.audit.recorded import ChangedPart, Difference, RecordedAnswer
from tpdet.errors import UsageError
from tpdet.grammar import trial
from tpdet.launch.host.standard_streams import error_is_terminal
from tpdet.llm.call import LlmCall, ProgressBar, UseTqdm
from tpdet.llm.followers import close_engine
from tpdet.llm.interrupts import Interrupts
from tpdet.llm.model import OfflineModel, Params, open_engine, use_device
from tpdet.llm.pooling import PoolingCalls
from tpdet.llm.predictions import read_predictions
from tpdet.llm.prompts import Asked, Message, Prompt, ReadPrompt, read_params
from tpdet.llm.ranks import CallRequests, CallResult, agree_on_call, give_up_world, share_answers
from tpdet.llm.recorded import CHECKED_AT_ONCE, difference_of
from tpdet.llm.results import RequestOutput
from tpdet.llm.vllm_keywords import refuse_what_asks
from tpdet.text.outputs import RequestAssembler

if TYPE_CHECKING:
    from tpdet.engine import Engine


class LLM(PoolingCalls, OfflineModel):
    """A model that answers lists of prompts; `help(LLM.__init__)` describes its settings.

    Under torchrun every rank makes the same calls and gets the same results; ranks that it started
    itself follow its calls. One call runs at a
    time; a second thread waits. `with LLM(...) as llm:` closes it at the end. A call that fails, or
    that Ctrl-C ends, leaves the model usable; where that is impossible, the model is closed and
    later calls say why.
    """

    def _start(self) -> "Engine":
        self._calls = 0
        self._lock = threading.RLock()  # held by one call, or by closing
        self._busy = False
        self._over: str | None = None  # why it is closed
        engine = open_engine(self.config, streams=False, followers=self._followers)
        self._shared = engine.world.size > 1 and self._followers is None
        if self._followers is not None:
            self._finalizer = weakref.finalize(self, close_engine, engine, self._followers)
        return engine

    def _stop(self) -> None:
        if self._followers is not None:
            self._finalizer.detach()
        close_engine(self.engine, self._followers)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: Params = None,
        use_tqdm: UseTqdm = True,
        *,
        prompt_token_ids: Sequence[Any] | None = None,
        drafts: Sequence[Any] | None = None,
        predictions: Sequence[Any] | None = None,
        **of_vllm: Any,
    ) -> list[RequestOutput]:
        """Answer every prompt; results come in the prompts' order.

        prompts: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}, or a list of those.
        prompt_token_ids: an older place of the ids; `prompts` are then their texts, if given.
        sampling_params: one for all prompts, or one each. None: vLLM's defaults, which are
            temperature 1 and at most 16 tokens.
        use_tqdm: whether a terminal shows a progress bar; or a function to call in tqdm's place.
        drafts: for each prompt None, token ids that its output may begin with, or such ids for
            each of its choices. Right ones save steps; none changes a bit of an answer.
        predictions: for each prompt None, or text or token ids that large parts of its output may
            equal, such as the text that it edits. As drafts they change no bit.

        Every prompt is checked before the first one runs. Raises RequestError naming the prompt or
        the parameter, NumericalError when the model gave NaN for a prompt (no answer is returned
        then), UsageError when closed, DisagreementError when ranks call with different prompts.
        Keywords of vLLM's that ask for nothing (`lora_request=None`) are accepted.
        """
        refuse_what_asks("generate", of_vllm, ("prompt_token_ids", "drafts", "predictions"))
        read = partial(self._reader.prompts, prompts, prompt_token_ids)
        make = partial(self._requests, read, sampling_params, drafts, predictions)
        return self._answer(make, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: UseTqdm = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        **of_vllm: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them; results come in the same order.

        messages: dictionaries with `role` and `content`, as in the chat API.
        sampling_params: as for `generate`, with the same defaults (vLLM's): give `max_tokens`.
        chat_template: Jinja text, in place of the model's own template.
        add_generation_prompt: end the prompt with the start of an assistant's answer.
        continue_final_message: end it with the last message's content instead, which the answer
        goes on with; add_generation_prompt is then False.
        chat_template_kwargs: JSON values of the template's variables, by name.
        tools: declarations of functions, as in the chat API, that the template shows. Calls stand
            in the answers' texts as the model writes them: a server reads them.

        Raises as `generate`.
        """
        refuse_what_asks("chat", of_vllm, ("chat_template", "chat_template_kwargs"))
        read = partial(
            self._reader.conversations,
            messages,
            chat_template,
            add_generation_prompt,
            continue_final_message,
            chat_template_kwargs,
            tools,
        )
        return self._answer(partial(self._requests, read, sampling_params), use_tqdm)

    def check(
        self, answers: Sequence[RecordedAnswer], use_tqdm: UseTqdm = True
    ) -> list[Difference | ChangedPart | None]:
        """Compute recorded answers again: the first difference of each, or None where all is equal.

        Their tokens are verified as drafts, many in one step, so equal answers take a fraction of
        the time in which they were made. Ids, bits of log-probability and digests are compared.

        Contract id, model digest and every answer are checked before the first one runs. Raises
        DisagreementError for an answer of another contract or other weights, RequestError for one
        that cannot run, UsageError in the approximate mode and with `fixed_batch`.
        """
        return [
            difference_of(answer, output, self._reader.eos_token_ids)
            for answer, output in zip(answers, self.computed(answers, use_tqdm), strict=True)
        ]

    def computed(
        self, answers: Sequence[RecordedAnswer], use_tqdm: UseTqdm = True
    ) -> list[RequestOutput]:
        """What `check` compares recorded answers with: their requests' answers. Raises as it."""
        return self._answer(partial(self._recorded_requests, answers), use_tqdm)

    def recompute(
        self, assemblers: Sequence[RequestAssembler], use_tqdm: UseTqdm = True
    ) -> list[RequestOutput]:
        """Answer checked requests, whose drafts are recorded answers, into their assemblers.

        On ranks above 0 the assemblers stay empty. Raises as `check`.
        """
        return self._answer(partial(self._assembled, assemblers), use_tqdm)

    @property
    def closed(self) -> bool:
        """Whether it no longer answers requests."""
        return self._over is not None

    def close(self) -> None:
        """Close, all ranks together, after a call that runs; a second time is harmless."""
        with self._lock:
            if self._over is not None:
                return
            self._refuse_inside()
            self._over = "this LLM is closed: make a new one"
            use_device(self.engine)
            self._stop()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._shared:
            self._end(error)  # the other ranks may be elsewhere: do not wait for them
        self.close()

    def _answer(self, make: Callable[[], CallRequests], use_tqdm: UseTqdm) -> list[Any]:
        with self._one_call(), Interrupts() as interrupts:
            try:
                result = self._run_call(make, use_tqdm, interrupts)
            except BaseException as error:
                found = error
                if self._followers is not None:
                    found = self._followers.explained(error)
                self._end(found)
                if found is not error:
                    raise found from error
                raise
        if isinstance(result, BaseException):
            raise result
        return result

    def _run_call(
        self, make: Callable[[], CallRequests], use_tqdm: UseTqdm, interrupts: Interrupts
    ) -> CallResult:
        """The answers, or the error that ended the call and left the engine usable.

        Any other error is raised: the state of the engine or of another rank is unknown then.
        """
        use_device(self.engine)
        given = agree_on_call(self.engine, make, self._shared)
        if isinstance(given, BaseException):
            return given
        self._calls += 1
        if not given.requests:
            return []
        if self._followers is not None:
            self._followers.go()
        if self.rank > 0:
            self.engine.worker_loop()
            return share_answers(self.engine, None)
        result: CallResult
        call = LlmCall(self.engine, given, self._writer)
        try:
            with _progress(use_tqdm, len(given.requests)) as bar:
                call.run(bar, interrupts)
            result = call.outputs()
        except BaseException as error:
            if call.inside_engine:
                raise
            result = error
            call.abandon()
        self.engine.stop_workers()
        return share_answers(self.engine, result) if self._shared else result

    def _requests(
        self,
        read: Callable[[], list[ReadPrompt]],
        sampling_params: Params,
        drafts: Sequence[Any] | None = None,
        predictions: Sequence[Any] | None = None,
    ) -> CallRequests:
        """The checked requests of a call. Raises RequestError."""
        prompts = read()
        given = read_params(sampling_params, len(prompts))
        expected = read_predictions(self._reader, drafts, predictions, given)
        asked = self._checked(list(zip(prompts, given, expected, strict=True)))
        return CallRequests(asked, [prompt.text for prompt in prompts])

    def _recorded_requests(self, answers: Sequence[RecordedAnswer]) -> CallRequests:
        """The checked requests that compute recorded answers again."""
        asked = self._checked(self._recorded(answers))
        return CallRequests(asked, [None] * len(asked), CHECKED_AT_ONCE)

    def _assembled(self, assemblers: Sequence[RequestAssembler]) -> CallRequests:
        """The requests of assemblers, whose schemas were tried."""
        for assembler in assemblers:
            form = assembler.request.params.form
            if form is not None:
                self.engine.grammars.constrain(form)
        return CallRequests([*assemblers], [None] * len(assemblers), CHECKED_AT_ONCE)

    def _checked(self, asked: Sequence[Asked]) -> list[RequestAssembler]:
        assemblers = []
        for index, (prompt, params, expected) in enumerate(asked):
            request = self._request(prompt, params, expected, f"llm-{self._calls}-{index}")
            assemblers.append(RequestAssembler(request, self.tokenizer))
            if params.form is not None:
                trial.check(params.form)
                self.engine.grammars.constrain(params.form)
        return assemblers

    @contextmanager
    def _one_call(self) -> Iterator[None]:
        self._refuse_fork()
        with self._lock:
            self._refuse_inside()
            if self._over is not None:
                raise UsageError(self._over)
            self._busy = True
            try:
                yield
            finally:
                self._busy = False

    def _refuse_fork(self) -> None:
        if self._followers is not None and not self._followers.ours:
            raise UsageError(
                "this LLM's ranks follow the process that made it, and this one is a fork of it: "
                "make an LLM after the fork, or start processes by spawn"
            )

    def _refuse_inside(self) -> None:
        if self._busy:
            raise UsageError("this LLM is in a call of this very thread: wait until it returns")

    def _end(self, error: BaseException) -> None:
        """Close because of `error`, and report it to the other ranks."""
        if self._over is None:
            why = str(error).strip().splitlines() or [""]
            self._over = (
                f"this LLM is closed: it ended by {type(error).__name__}"
                f"{': ' + why[0] if why[0] else ''}; make a new one"
            )
            with suppress(Exception):
                give_up_world(self.engine, error)
            if self._followers is not None:
                self._finalizer.detach()
                self._followers.kill()


def _progress(use_tqdm: UseTqdm, total: int) -> ProgressBar:
    if callable(use_tqdm):
        return use_tqdm(total=total, desc="prompts")
    return tqdm(total=total, desc="prompts", disable=not (use_tqdm and error_is_terminal()))
