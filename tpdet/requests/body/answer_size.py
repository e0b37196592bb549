"""How large an answer may become: tokens that it shows, times the alternatives beside each."""

from collections.abc import Sequence

from tpdet.requests.body.limits import MAX_LOGPROBS_IN_ANSWER
from tpdet.requests.body.problems import bad_request
from tpdet.requests.body.schema import GenerationBody


def check_answer_size(
    prompt_lengths: Sequence[int],
    body: GenerationBody,
    *,
    chat: bool,
    echo: bool,
    logprobs: int | None,
    max_tokens: int,
) -> None:
    """Refuse (ApiError 400) a request whose answer could hold more than MAX_LOGPROBS_IN_ANSWER.

    A prompt's token counts for each choice that shows the prompt, and by what shows it:
    `prompt_logprobs` (of a chat once), `echo` and `return_token_ids` (of a chat once more). A
    generated token counts where it has log-probabilities. No alternative counts as one.
    """
    choices = body.n or 1
    repeats = 1 if chat else choices
    generated = len(prompt_lengths) * choices * max_tokens if logprobs is not None else 0
    beside = max(1, logprobs or 0)
    shown_by = {
        "prompt_logprobs": 0 if body.prompt_logprobs is None else max(1, body.prompt_logprobs),
        "echo": beside if echo else 0,
        "return_token_ids": int(bool(body.return_token_ids)) * (choices + 1 if chat else 1),
    }
    prompt, times = repeats * sum(prompt_lengths), sum(shown_by.values())
    last = body.prompt_logprobs_last_n
    unscored = 0 if last is None else sum(max(0, length - last) for length in prompt_lengths)
    total = prompt * times + generated * beside - repeats * unscored * shown_by["prompt_logprobs"]
    if total <= MAX_LOGPROBS_IN_ANSWER:
        return
    counts = [f"{prompt} prompt tokens x {times}"] if prompt * times else []
    counts += [f"{generated} tokens to generate x {beside}"] if generated else []
    if generated * beside > prompt * times:
        param, remedy = "logprobs", "lower max_tokens, n or the alternatives to each token"
    else:
        param = max(shown_by, key=lambda name: shown_by[name])
        remedy = "send fewer or shorter prompts at once, or lower the alternatives to each token"
    raise bad_request(
        f"the answer may hold {total} log-probabilities ({' + '.join(counts)} alternatives); the "
        f"limit is {MAX_LOGPROBS_IN_ANSWER}: {remedy}",
        param,
    )
