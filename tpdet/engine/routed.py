"""Gives the last output of each choice the experts that its tokens chose."""

from collections.abc import Mapping, Sequence

import msgspec

from tpdet.cache.routes import Routes
from tpdet.requests.request import TokenOutput
from tpdet.scheduler.results import Output

SequencePages = Mapping[tuple[str, int], tuple[tuple[int, ...], int]]
"""By request and choice: the pages of a sequence, and the position of its next token."""


def with_routes(outputs: Sequence[Output], pages_of: SequencePages, routes: Routes) -> list[Output]:
    """The outputs of a step that was committed just now; no other step may have been launched.

    pages_of: as before the commit, which lets pages go. The last token of a choice was never read,
    so it chose no expert.
    """
    routed: list[Output] = []
    behind: dict[tuple[str, int], int] = {}  # tokens of a row before the present one
    for output in outputs:
        if isinstance(output, TokenOutput):
            key = output.request_id, output.choice
            index = behind.setdefault(key, 0)
            behind[key] += 1
            if output.finish_reason is not None:
                pages, begin = pages_of[key]
                ids = routes.read(pages, begin + index)
                output = msgspec.structs.replace(output, routed_experts=ids)
        routed.append(output)
    return routed
