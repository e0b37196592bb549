"""The fixture `golden`: asks for an answer and holds it against the recorded one."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tpdet.errors import UsageError
from tpdet.requests.routes import CHATS, COMPLETIONS
from tpdet.tools.check.answers import Question
from tpdet.tools.check.targets import AnswerTarget, target_of
from tpdet.tools.golden.golden_file import Json, read_goldens, stored_form, write_goldens
from tpdet.tools.golden.verdicts import answer_texts, changed_request, verdicts

if TYPE_CHECKING:
    from tpdet.tools.golden.pytest_plugin import GoldenUse

UPDATE = "pytest --tpdet-update"
FOLDER = "__golden__"
_OWN = {"prompt": "the second argument", "messages": "the second argument",
        "stream": "left out: a golden is a whole answer"}  # fmt: skip


class GoldenError(AssertionError):
    """An answer is not its golden one, or there is none; the message has the remedy."""


class IncomparableGoldenError(Exception):
    """A golden says nothing of this target: it is of another contract or of other weights."""

    golden_cannot_be_compared = True


class GoldenAnswer(NamedTuple):
    """An answer that is equal to its golden one, or was written as such.

    text, token_ids, logprob_bits: of the first choice; body: the whole answer over HTTP.
    """

    text: str
    token_ids: tuple[int, ...]
    logprob_bits: tuple[str, ...]
    replay_digest: str
    body: Json


class Golden:
    """`golden(llm_or_url, prompt_or_messages, *, name=None, **params)`; docs/golden.md."""

    def __init__(self, use: "GoldenUse", module: Path, test: str) -> None:
        """use: what this run of pytest knows of goldens; test: its name inside the module."""
        self._use, self._test = use, test
        self.path = module.parent / FOLDER / f"{module.stem}.json"
        self._count = 0

    def __call__(
        self, llm_or_url: Any, prompt_or_messages: Any, *, name: str | None = None, **params: Any
    ) -> GoldenAnswer:
        """The answer, after it was verified against the recorded one.

        llm_or_url: an `LLM`, or the address of a running server.
        prompt_or_messages: text or token ids (`/v1/completions`), or messages
            (`/v1/chat/completions`).
        name: names this golden among several of the test; None numbers them.
        params: fields of the request's body, such as max_tokens=16, temperature=0.

        Raises GoldenError for an answer that differs or has no golden, IncomparableGoldenError for
        a golden of another contract, other weights or another architecture, UsageError for other
        arguments; else as `LLM.generate` or a client of the server.
        """
        __tracebackhide__ = True
        key = self._key(name)
        url, body = _question(prompt_or_messages, params)
        self._use.used(self.path, key)
        goldens = self._use.goldens(self.path, read_goldens)
        source = f"{FOLDER}/{self.path.name}"
        stored = goldens.get(key)
        why = _why_not(key, stored, source, url, body)
        target = target_of(llm_or_url)
        if not why and stored is not None:
            (verdict,) = verdicts(target, {key: stored}, source)
            if verdict.equal:
                return _answer(stored)
            if not verdict.comparable and not self._use.update:
                raise IncomparableGoldenError(
                    f"{verdict.text}\n\nIf the change is meant, record it anew: {UPDATE}"
                )
            why = verdict.text
        if not self._use.update:
            raise GoldenError(f"{why}\n\nIf this is meant, write it: {UPDATE}, and commit the file")
        return _answer(self._write(target, key, url, body))

    def _key(self, name: str | None) -> str:
        if name is not None and (not isinstance(name, str) or not name):
            raise UsageError(f"golden(name={name!r}): give a text, or leave it out")
        self._count += name is None
        if name is None and self._count == 1:
            key = self._test
        else:
            key = f"{self._test} # {name or self._count}"
        if self._use.was_used_by_this_test(self.path, key):
            raise UsageError(f"golden(name={name!r}) is called twice in a test: name them apart")
        return key

    def _write(self, target: AnswerTarget, key: str, url: str, body: Json) -> Json:
        (line,) = target.record([Question(key, url, body)])
        stored = stored_form(line)
        write_goldens(self.path, {key: stored})
        self._use.wrote(self.path, key, stored)
        return stored


def _why_not(key: str, stored: Json | None, source: str, url: str, body: Json) -> str:
    """Why a golden cannot pass before anything is computed; empty if it may."""
    if stored is None:
        return f"there is no golden {key!r} in {source}"
    parts = changed_request(stored, url, body)
    return parts and f"golden {key!r} of {source} was recorded for another request:\n{parts}"


def _question(prompt_or_messages: Any, params: dict[str, Any]) -> tuple[str, Json]:
    """The route and the body that ask. Raises UsageError."""
    for name, remedy in _OWN.items():
        if name in params:
            raise UsageError(f"golden({name}=...): {name} is {remedy}")
    asked = prompt_or_messages
    kinds = {type(one) for one in asked} if isinstance(asked, list | tuple) else set()
    if isinstance(asked, str) or kinds == {int}:
        url, body = COMPLETIONS, {"prompt": asked, **params}
    elif kinds == {dict}:
        url, body = CHATS, {"messages": asked, **params}
    else:
        raise UsageError(
            f"golden() is asked {asked!r:.60}: give a text, a list of token ids or a list of "
            "messages, one prompt for each golden"
        )
    try:
        sent: Json = json.loads(json.dumps(body))
    except (TypeError, ValueError) as error:
        raise UsageError(f"golden(): {error}: give values that JSON has") from None
    return url, sent


def _answer(stored: Json) -> GoldenAnswer:
    body = stored["response"]["body"]
    choice = body["choices"][0]
    return GoldenAnswer(
        answer_texts(stored)[0] or "",
        tuple(choice["token_ids"]),
        tuple(choice["logprob_bits"]),
        body["tpdet"]["replay_digest"],
        body,
    )
