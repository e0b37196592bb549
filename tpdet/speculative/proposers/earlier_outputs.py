"""Earlier outputs of the same prompt under the same salts, as predictions of the next one."""

import hashlib
from array import array
from collections import OrderedDict

from tpdet.requests.request import Request

_LEAST_IDS = 8  # a shorter output is not worth keeping
_OUTPUTS = 4  # that are kept of a prompt
_MOST_IDS = 1 << 20  # of all outputs


class EarlierOutputs:
    """The latest outputs of each prompt; the prompts that were used last are kept."""

    def __init__(self) -> None:
        self._outputs: OrderedDict[bytes, list[tuple[int, ...]]] = OrderedDict()
        self._ids = 0

    def of(self, request: Request) -> tuple[int, ...]:
        """The ids of the prompt's outputs, the latest first; () if there are none."""
        return sum(reversed(self._outputs.get(_key(request), [])), start=())

    def remember(self, request: Request, output: tuple[int, ...]) -> None:
        """Keep an output."""
        if len(output) < _LEAST_IDS:
            return
        key = _key(request)
        outputs = self._outputs.setdefault(key, [])
        self._outputs.move_to_end(key)
        outputs.append(output)
        self._ids += len(output)
        if len(outputs) > _OUTPUTS:
            self._ids -= len(outputs.pop(0))
        while self._ids > _MOST_IDS and len(self._outputs) > 1:
            _, oldest = self._outputs.popitem(last=False)
            self._ids -= sum(map(len, oldest))


def _key(request: Request) -> bytes:
    """Names prompt and salts: who may not share a cached prefix learns of no output."""
    salts = "\0".join((request.tenant_salt, request.cache_salt)).encode()
    prompt = array("q", request.prompt_token_ids).tobytes()
    return hashlib.sha256(len(salts).to_bytes(8, "big") + salts + prompt).digest()
