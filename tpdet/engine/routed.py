"""Gives the last output of each choice the experts that its tokens chose."""

from collections.abc import Mapping, Sequence

import msgspec

from tpdet.cache.routes import Routes
from tpdet.kernels.order import PAGE_TOKENS
from tpdet.request import TokenOutput
from tpdet.scheduler.results import Output

Held = Mapping[tuple[str, int], tuple[tuple[int, ...], int]]
"""By request and choice: the pages of a sequence, and how many tokens it had, one of them new."""


def with_routes(outputs: Sequence[Output], held: Held, routes: Routes) -> list[Output]:
    """The outputs of a step that was committed just now; no other step may have been launched.

    held: as before the commit, which lets pages go. The last token of a choice was never read, so
    it chose no expert.
    """
    found: list[Output] = []
    for output in outputs:
        if isinstance(output, TokenOutput) and output.finish_reason is not None:
            pages, tokens = held[output.request_id, output.choice]
            count = min(tokens - (output.token_id >= 0), len(pages) * PAGE_TOKENS)
            ids = routes.read(pages, count)
            output = msgspec.structs.replace(output, routed_experts=ids)
        found.append(output)
    return found
