"""Loads a tokenizer while something else starts: a large vocabulary takes seconds."""

from concurrent.futures import Future
from pathlib import Path
from threading import Thread

from tpdet.text.tokenizer import Tokenizer


class TokenizerAhead:
    """A tokenizer that a thread loads from now on."""

    def __init__(self, directory: Path, chat_template: str | None = None) -> None:
        """Arguments as of `Tokenizer.load`."""
        self._loaded: Future[Tokenizer] = Future()
        given = directory, chat_template
        Thread(target=self._load, args=given, name="tokenizer", daemon=True).start()

    def _load(self, directory: Path, chat_template: str | None) -> None:
        try:
            self._loaded.set_result(Tokenizer.load(directory, chat_template))
        except BaseException as error:  # is raised where the tokenizer is asked for
            self._loaded.set_exception(error)

    def result(self) -> Tokenizer:
        """The tokenizer, as soon as it is there. Raises what `Tokenizer.load` raises."""
        return self._loaded.result()
