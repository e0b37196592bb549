"""The ids and bits of a client's answer, for which the server is asked beside the client.

The client's request goes out as it is, and its answer names a replay digest and no ids. So the same
request is asked again, with the seed that was used, for ids; its digest, which covers every id and
bit, must be the one that the client got.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from tpdet.client.address import Address
from tpdet.client.batch import recorded_body
from tpdet.errors import PeerLostError, RequestError
from tpdet.tools.check.answers import Question
from tpdet.tools.tape.answers import shown_answer, texts_of
from tpdet.tools.tape.tape_file import Ids, Json, Turn
from tpdet.tools.tape.upstream import post_json

_OF_STREAMS = ("stream", "stream_options")
_COUNTS = ("accepted_prediction_tokens", "rejected_prediction_tokens")


def question_of(turn: Turn, date: str | None) -> Question:
    """The request of a turn as one whose answer can be checked; date: of the chat template."""
    body = {key: value for key, value in (turn.body or {}).items() if key not in _OF_STREAMS}
    return Question(turn.name, turn.url, recorded_body(turn.url, body, date))


class IdsTask:
    """Asks for the ids of one answer after the other, while the client goes on."""

    def __init__(
        self, address: Address, key: str | None, date: str | None, tell: Callable[[Ids], None]
    ) -> None:
        self._address, self._key, self._date, self._tell = address, key, date, tell
        self._turns: asyncio.Queue[Turn | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._run())

    @property
    def waiting(self) -> int:
        """Answers whose ids are still to be asked for."""
        return self._turns.qsize()

    def add(self, turn: Turn) -> None:
        """Ask for the ids of this answer too."""
        self._turns.put_nowait(turn)

    async def finish(self) -> None:
        """Wait until all have come."""
        self._turns.put_nowait(None)
        await self._task

    def stop(self) -> None:
        """Ask for no more."""
        self._task.cancel()

    async def _run(self) -> None:
        while (turn := await self._turns.get()) is not None:
            try:
                ids = Ids(turn.turn, await self._ask(turn))
            except (RequestError, PeerLostError) as error:
                ids = Ids(turn.turn, None, str(error))
            self._tell(ids)

    async def _ask(self, turn: Turn) -> Json:
        """The answer with ids. Raises RequestError where there is none of this digest."""
        shown = shown_answer(turn) or {}
        origin = shown.get("tpdet")
        digest = origin.get("replay_digest") if isinstance(origin, dict) else None
        if not isinstance(origin, dict) or digest is None:
            raise RequestError("the answer names no replay digest, so no other one is held to it")
        question = question_of(turn, self._date)
        body, is_helped = _with_prediction(_seeded(question.body, origin), shown)
        answer = await post_json(self._address, question.url, body, self._key)
        again = answer["tpdet"]["replay_digest"]
        if again != digest:
            raise RequestError(
                f"the server gave another answer when it was asked again: its replay digest is "
                f"{again}, the client's {digest}"
            )
        if is_helped:
            _drop_counts(answer)
        return dict(answer)


def _seeded(body: Json, origin: Json) -> Json:
    """The body with the seeds that were used, to be answered whole."""
    rest = {key: value for key, value in body.items() if key != "tpdet"}
    own = {key: value for key, value in (body.get("tpdet") or {}).items() if key != "resume"}
    if origin.get("seeds"):
        own["seeds"] = origin["seeds"]
    else:
        rest["seed"] = origin.get("seed")
    return rest | ({"tpdet": own} if own else {})


def _with_prediction(body: Json, shown: Json) -> tuple[Json, bool]:
    """The body with the answer's text as its prediction, which changes no bit and saves steps."""
    prompt: Any = body.get("prompt")
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    text = texts_of(shown)
    if several or body.get("echo") or body.get("prediction") is not None or not text:
        return body, False
    return {**body, "prediction": {"type": "content", "content": text}}, True


def _drop_counts(answer: Json) -> None:
    """Leave out the counts of a prediction that the client did not send."""
    usage = answer.get("usage") or {}
    details = usage.get("completion_tokens_details") or {}
    for name in _COUNTS:
        details.pop(name, None)
    if not details:
        usage.pop("completion_tokens_details", None)
