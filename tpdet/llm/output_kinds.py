"""Turns the answers so far of one request into the kind of outputs that its parameters ask for."""

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace

from tpdet.llm.results import CompletionOutput, RequestOutput
from tpdet.requests.output_kind import RequestOutputKind


async def of_kind(
    kind: RequestOutputKind, outputs: AsyncIterator[RequestOutput]
) -> AsyncGenerator[RequestOutput, None]:
    """The outputs of one request, each of which holds everything so far, as `kind` says."""
    last: RequestOutput | None = None
    async for output in outputs:
        if kind == RequestOutputKind.CUMULATIVE or (
            kind == RequestOutputKind.FINAL_ONLY and output.finished
        ):
            yield output
        elif kind == RequestOutputKind.DELTA:
            new, last = _since(last, output), output
            if new.outputs or new.finished:
                yield new


def _since(last: RequestOutput | None, output: RequestOutput) -> RequestOutput:
    """What `output` adds to `last`: of each choice that grew or ended its new tokens and text."""
    if last is None:
        return output
    choices = [
        _grown(old, new)
        for old, new in zip(last.outputs, output.outputs, strict=True)
        if len(new.token_ids) > len(old.token_ids)
        or new.text != old.text
        or new.finish_reason != old.finish_reason
    ]
    return replace(output, outputs=choices, prompt_logprobs=None, prompt_routed_experts=None)


def _grown(old: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    begin = len(old.token_ids)
    return replace(
        new,
        text=new.text[len(old.text) :],
        token_ids=new.token_ids[begin:],
        logprobs=None if new.logprobs is None else new.logprobs[begin:],
        logprob_bits=new.logprob_bits[begin:],
    )
