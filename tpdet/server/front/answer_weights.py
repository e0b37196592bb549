"""Which weights computed the tokens of one answer, and what the answer says of them."""

from collections.abc import Callable, Sequence

from tpdet.requests.answer.choices import Json
from tpdet.requests.engine_facts import EngineFacts
from tpdet.text.outputs import WeightSpan, weights_of

FactsOf = Callable[[int], EngineFacts]
"""The engine's facts under the weights of a number."""
_NONE = -1  # of which no token is: the first weights have no old keys


class AnswerWeights:
    """The weights of an answer so far.

    `facts` are those under the weights of its first tokens, `number` is `TokenOutput.weights` of
    its latest ones, and -1 before there are any. `mixed`: it has tokens of several. `old_keys`: it
    has tokens that were computed over keys and values of other weights.
    """

    def __init__(self, facts: EngineFacts, facts_of: FactsOf) -> None:
        self.facts, self._facts_of = facts, facts_of
        self.number, self.mixed, self.old_keys = _NONE, False, False

    def note(self, number: int) -> None:
        """Note the weights of the next tokens, or of a prompt's scores."""
        self.old_keys = self.old_keys or number < _NONE
        if self.number == _NONE:
            if number != self.facts.weights_number:
                self.facts = self._facts_of(number)
        elif number != self.number:
            self.mixed = True
        self.number = number

    @property
    def latest(self) -> int:
        """The number of the latest tokens, or of those that are to come first."""
        return self.facts.weights_number if self.number == _NONE else self.number

    def facts_of(self, number: int) -> EngineFacts:
        """The engine's facts under the weights of some tokens."""
        number = weights_of(number)
        return self.facts if number == self.facts.weights_number else self._facts_of(number)

    def fingerprint(self, number: int, approximate: bool) -> str:
        """The system fingerprint of tokens by the weights of a number."""
        facts = self.facts_of(number)
        return facts.approximate_fingerprint if approximate else facts.system_fingerprint

    def spans(self, spans: Sequence[WeightSpan]) -> list[Json]:
        """The `weight_versions` of a choice: which of its tokens [start, end) are of which."""
        shown: list[Json] = []
        for number, start, end in spans:
            facts = self._facts_of(weights_of(number))  # its name may be another by now
            span = {"version": facts.weight_version, "start": start, "end": end}
            old = {"old_keys": True} if number < 0 else {}
            shown.append(span | {"weights": facts.model_digest} | old)
        return shown
