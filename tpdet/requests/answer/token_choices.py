"""JSON of vLLM's answers of token ids (`/inference/v1/generate`): ids, log-probabilities, ranks.

Each entry names its token twice, as `token_id` and as `token` ("token_id:5"): clients of different
ages read the one or the other.
"""

import io
from base64 import b64encode
from collections.abc import Iterator

import numpy as np

from tpdet.control.row_messages import SampledToken
from tpdet.requests.answer.choices import ChoiceWriter, Json, array_of
from tpdet.requests.answer.prompt_scores import PromptScores
from tpdet.text.outputs import ChoiceAnswer, TextDelta, logprob_bits, shortest_float32
from tpdet.text.token_names import id_name


class TokenChoiceWriter(ChoiceWriter):
    """Writes one choice of token ids, whole or in pieces."""

    def whole(
        self, answer: ChoiceAnswer, prompt: PromptScores | None, versions: list[Json] | None = None
    ) -> Json:
        """The finished choice, with its experts if they are returned."""
        choice = super().whole(answer, prompt, versions)
        return choice | {"routed_experts": self._experts(answer.routed_experts)}

    def event(self, around: Json, piece: Json, first: bool) -> Json:
        """An event's content; the answer's first one has the prompt's ids if they are asked for."""
        if first and self.index == 0 and self.call.token_ids:
            around = around | {"prompt_token_ids": self._prompt_ids}
        return super().event(around, piece, first)

    def _piece(
        self,
        part: ChoiceAnswer | TextDelta,
        tokens: tuple[SampledToken, ...],
        offsets: tuple[int, ...],
        prompt: PromptScores | None,
        stream: bool = False,
    ) -> Json:
        self.begun = True
        choice: Json = {"index": self.index, "token_ids": [token.token_id for token in tokens]}
        content = array_of(map(self._scored, tokens), len(tokens))
        choice["logprobs"] = None if self.call.logprobs is None else {"content": content}
        if self.call.token_ids:
            choice["logprob_bits"] = [logprob_bits(token.logprob) for token in tokens]
        return choice

    def _scored(self, token: SampledToken) -> Json:
        """A token, and beside it itself and the likeliest others, in this order."""
        entry = _entry(token.token_id, token.logprob, token.rank)
        return entry | {"top_logprobs": [entry, *self._others(token)]}

    def _others(self, token: SampledToken) -> Iterator[Json]:
        for rank, other in enumerate(token.top[: self.call.logprobs or 0], 1):
            if other.token_id != token.token_id:
                yield _entry(other.token_id, other.logprob, None if self.call.given_ids else rank)

    def _experts(self, experts: bytes) -> str | Json | None:
        """Ids [T, layers, k]: base64 of a `.npy` file of int16, or an object, as prime-rl has it.

        An object holds the fewest bytes that an id needs. Clients look for its `data` as the first
        key, before they read the JSON.
        """
        if not experts:
            return None
        layers, chosen = self.call.experts_shape
        ids = np.frombuffer(experts, dtype=np.int16).reshape(-1, layers, chosen)
        start = self.call.experts_start
        ids = ids[start:]
        if self.call.experts_as_object:
            dtype = np.uint8 if ids.max(initial=0) < 1 << 8 else np.uint16
            data = b64encode(ids.astype(dtype).tobytes()).decode("ascii")
            about = {"shape": list(ids.shape), "dtype": np.dtype(dtype).name, "start": start}
            return {"data": data} | about
        file = io.BytesIO()
        np.lib.format.write_array(file, ids, allow_pickle=False)
        return b64encode(file.getvalue()).decode("ascii")


def _entry(token_id: int, logprob: float, rank: int | None) -> Json:
    return {
        "token_id": token_id,
        "token": id_name(token_id),
        "logprob": shortest_float32(logprob),
        "rank": rank,
    }
