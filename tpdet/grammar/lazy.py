"""The grammars of an engine, loaded at their first use."""

from tpdet.checkpoint.resolve import resolve_tokenizer
from tpdet.config import EngineConfig
from tpdet.errors import RequestError
from tpdet.grammar.constraint import Constraint, Grammars
from tpdet.grammar.places import FIELD
from tpdet.requests.answer_form import AnswerForm
from tpdet.text.tokenizer import Tokenizer


class LazyGrammars:
    """Schemas over the vocabulary of the model that an engine serves."""

    def __init__(self, config: EngineConfig, vocab_size: int) -> None:
        """vocab_size: the model's, which may be larger than the tokenizer's."""
        self._config, self._vocab_size = config, vocab_size
        self._loaded: Grammars | None = None

    def load(self, tokenizer: Tokenizer | None = None) -> Grammars:
        """The grammars; the first call takes seconds for a large vocabulary.

        tokenizer: the model's, if it is loaded already. Raises RequestError without a tokenizer or
        the library.
        """
        if self._loaded is None:
            self._loaded = Grammars(tokenizer or self._tokenizer(), self._vocab_size)
        return self._loaded

    def _tokenizer(self) -> Tokenizer:
        config = self._config
        if config.skip_tokenizer_init:
            raise RequestError("response_format needs a tokenizer: none is loaded", FIELD)
        directory = resolve_tokenizer(config.tokenizer, config.model, config.revision)
        return Tokenizer.load(directory, config.chat_template)

    def constrain(self, form: AnswerForm) -> Constraint:
        """A choice's constraint. Raises RequestError as `load`, and for a form of no use."""
        return self.load().constrain(form)
