"""Text from token ids as they are committed: the pieces concatenate to the one-shot text, always.

Serving systems commonly decode a sliding window of ids again for each token and send the
difference. That costs a window a token, stalls on runs of invalid bytes and can contradict the
one-shot text. Here a token gives its bytes once, and an incremental UTF-8 decoder does the rest.
"""

from tpdet.text.token_bytes import TokenJoiner
from tpdet.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """One text; at most the bytes of one unfinished character are held back."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._joiner = TokenJoiner(tokenizer.decoder_rules)

    def push(self, token_id: int) -> str:
        """The text that this token completes, often "" inside a multi-byte character."""
        token = self._tokenizer.token(token_id, self._skip)
        return "" if token is None else self._joiner.push(token)

    def start_in(self, text: str, token_id: int) -> int:
        """Where in `text`, which pushing the token gave, its own text begins.

        That is 0 but where bytes of tokens before it turned out to be no character.
        """
        own = self._tokenizer.token_text(token_id) if "\ufffd" in text else ""
        return len(text) - len(own) if own and text.endswith(own) else 0

    def finish(self) -> str:
        """What is held back; nothing may be pushed afterwards."""
        return self._joiner.finish()
