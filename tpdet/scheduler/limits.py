"""What the scheduler refuses at admission: requests that could never run."""

from tpdet.errors import IntegrityError, RequestError
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.requests.request import Request
from tpdet.scheduler.sequence import pages_for


def check_drafts(request: Request, fixed_batch: int | None, approximate: bool) -> None:
    """Refuse (RequestError) drafts where a step's rows are fixed or reach the bits.

    An approximate answer cannot be resumed either: nobody can compute it again.
    """
    if request.resumed and approximate:
        raise RequestError(
            "an approximate answer cannot be resumed: ask for it from its beginning", "tpdet.resume"
        )
    if not request.drafts or not (fixed_batch or approximate):
        return
    if request.resumed:
        raise RequestError(
            f"resumed tokens are not verified with fixed_batch {fixed_batch} (--fixed-batch): ask "
            "for the answer from its beginning",
            "tpdet.resume",
        )
    why = f"fixed_batch {fixed_batch} (--fixed-batch)" if fixed_batch else "the approximate mode"
    raise RequestError(f"drafts are not verified with {why}: leave drafts out", "drafts")


def check_fits(request: Request, num_pages: int, max_model_len: int) -> None:
    """Refuse a request that is empty, over the context, or larger than the whole KV cache.

    num_pages: pages of the whole KV cache; max_model_len: tokens of one sequence. Raises
    RequestError with the value, the limit and the remedy; IntegrityError for a request whose seed
    the engine did not resolve.
    """
    if request.params.seed is None:
        raise IntegrityError(f"request {request.request_id} has no seed: resolve it before add")
    length, max_tokens = len(request.prompt_token_ids), request.max_tokens
    if not length:
        raise RequestError("the prompt is empty: give at least one token", "prompt")
    if length + max_tokens > max_model_len:
        raise RequestError(
            f"prompt of {length} tokens plus max_tokens {max_tokens} is {length + max_tokens}, "
            f"over the context of {max_model_len}: shorten the prompt or lower max_tokens",
            "max_tokens" if length < max_model_len else "prompt",
        )
    # The last generated token is never computed, so it needs no page.
    needed = pages_for(length + max(max_tokens - 1, 0))
    if needed > num_pages:
        raise RequestError(
            f"prompt of {length} tokens plus max_tokens {max_tokens} needs {needed} KV pages of "
            f"{PAGE_TOKENS} tokens, and the cache has {num_pages}: lower max_tokens or raise "
            "kv_pages (--kv-pages)",
            "max_tokens" if pages_for(length) <= num_pages else "prompt",
        )
