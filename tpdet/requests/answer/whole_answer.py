"""The choices of one call, and the JSON of its whole answer.

A server writes an answer with it; `tpdet check` writes the answer that a recorded one is held
against.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from tpdet.control.row_messages import SampledToken
from tpdet.requests.answer.choices import ChoiceWriter, Json, envelope, usage
from tpdet.requests.answer.prompt_scores import PromptScores
from tpdet.requests.body.prepare import Call
from tpdet.requests.request import Request
from tpdet.text.outputs import RequestAssembler
from tpdet.text.reasoning import ReasoningParser, ReasoningSplitter
from tpdet.text.tokenizer import Tokenizer


class WholeAnswer:
    """What assembles and what writes each choice of a call.

    `assemblers` have a request's outputs, by its id; `writers` a choice's JSON, by that id and its
    place; `prompts` the scores of the prompts that have some.
    """

    def __init__(
        self, call: Call, tokenizer: Tokenizer | None, reasoning: ReasoningParser | None
    ) -> None:
        """reasoning: what splits the answers of chats; None where they are not split."""
        self.call = call
        self._reasoning = reasoning if call.kind == "chat" else None
        self.prompts: dict[str, PromptScores] = {}
        self.assemblers = {
            request.request_id: RequestAssembler(request, tokenizer, self._splitter(request))
            for request in call.requests
        }
        self.writers = {
            (request.request_id, choice): ChoiceWriter(
                call,
                tokenizer,
                i * call.choices + choice,
                reasoning=self._reasoning is not None and call.include_reasoning,
            )
            for i, request in enumerate(call.requests)
            for choice in range(call.choices)
        }

    def body(self, seed: int, fingerprint: str, receipt: Json) -> Json:
        """The answer once all choices have ended; some of its arrays are made as it is written."""
        call = self.call
        found = envelope(call, seed, fingerprint, stream=False) | {"tpdet": receipt}
        if call.kind == "chat" and call.prompt_logprobs is not None:
            request_id = call.requests[0].request_id
            writer = self.writers[request_id, 0]
            found["prompt_logprobs"] = writer.prompt_logprobs(self.prompts.get(request_id))
        return {**found, "choices": self._choices(), "usage": self.usage()}

    def usage(self) -> Json:
        """The counts of tokens so far."""
        assemblers = self.assemblers.values()
        found = usage(self.call, sum(assembler.generated_tokens for assembler in assemblers))
        details: dict[str, int] = {}
        if self._reasoning is not None:
            details["reasoning_tokens"] = sum(one.reasoning_tokens for one in assemblers)
        if self.call.requests[0].prediction:
            # OpenAI's counts; tokens that nobody came to verify are in none.
            verified = sum(assembler.draft_tokens for assembler in assemblers)
            accepted = sum(assembler.accepted_draft_tokens for assembler in assemblers)
            details["accepted_prediction_tokens"] = accepted
            details["rejected_prediction_tokens"] = verified - accepted
        return found | ({"completion_tokens_details": details} if details else {})

    def tokens(self) -> Iterator[Iterator[Sequence[SampledToken]]]:
        """The tokens of each prompt's choices, as `replay_digest` takes them."""
        return map(self._tokens, self.assemblers.values())

    def _tokens(self, assembler: RequestAssembler) -> Iterator[Sequence[SampledToken]]:
        return (assembler.choice(index).logprobs for index in range(self.call.choices))

    def _choices(self) -> Iterator[Json]:
        for (request_id, choice), writer in self.writers.items():
            answer = self.assemblers[request_id].choice(choice)
            yield writer.whole(answer, self.prompts.get(request_id))

    def _splitter(self, request: Request) -> Callable[[], ReasoningSplitter] | None:
        """Makes what splits a choice; if a schema holds from the first token, all is content."""
        params = request.params
        all_content = params.form is not None and not params.json_schema_after
        if self._reasoning is None or all_content:
            return None
        ids, keep = request.prompt_token_ids, self.call.include_reasoning
        return partial(self._reasoning.splitter, ids, keep)


def origin(call: Call, contract: str, weights: str) -> Json:
    """What computes an answer, for those who record its tokens, and what the server chose for it.

    contract, weights: contract id and model digest.
    """
    params = call.requests[0].params
    found: Json = {"contract": contract, "weights": weights, "max_tokens": params.max_tokens}
    after = params.json_schema_after
    return found | ({"json_schema_after": list(after)} if after else {})


def receipt(origin: Json, seed: int, digest: str, version: int) -> Json:
    """The seed that replays an answer, and the digest that a replay must have."""
    return {**origin, "seed": seed, "replay_digest": digest, "replay_version": version}
