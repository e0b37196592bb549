"""Loads a tokenizer while something else starts: a large vocabulary takes seconds."""

from concurrent.futures import Future
from pathlib import Path
from threading import Thread

from tpdet.text.tokenizer import Tokenizer, TokenizerFiles, read_files


class TokenizerAhead:
    """A tokenizer that a thread loads from now on."""

    def __init__(
        self, directory: Path, chat_template: str | None = None, date: str | None = None
    ) -> None:
        """Arguments as of `Tokenizer.load`. Raises NotFoundError at once for a missing file."""
        self._loaded: Future[Tokenizer] = Future()
        files = read_files(directory, chat_template, date)
        Thread(target=self._load, args=(files,), name="tokenizer", daemon=True).start()

    def _load(self, files: TokenizerFiles) -> None:
        try:
            self._loaded.set_result(Tokenizer.from_files(files))
        except BaseException as error:  # is raised where the tokenizer is asked for
            self._loaded.set_exception(error)

    def result(self) -> Tokenizer:
        """The tokenizer, as soon as it is there. Raises CheckpointError as `Tokenizer.load`."""
        return self._loaded.result()
