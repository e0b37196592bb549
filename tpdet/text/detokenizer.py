"""Text from token ids as they are committed; the pieces always concatenate to the one-shot text.

Serving systems commonly decode a sliding window of ids again for each token and send the
difference. That decodes a whole window for each token, stalls on runs of invalid bytes, and can
contradict the one-shot text. Here each token gives its bytes once, to an incremental UTF-8 decoder.
A token that begins and ends between two characters has the same text everywhere: that is kept.
"""

from tpdet.text.token_bytes import TokenJoiner
from tpdet.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The text of one choice; at most the bytes of one unfinished character are held back."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._joiner = TokenJoiner(tokenizer.decoder_rules)
        self._texts = tokenizer.texts[skip_special_tokens]
        self._settled = False  # whether the next token's text depends on that token alone

    def push(self, token_id: int) -> str:
        """The text that this token completes, often "" inside a multi-byte character."""
        if self._settled:
            known = self._texts.get(token_id)
            if known is not None:
                return known
        token = self._tokenizer.token(token_id, self._skip)
        text = "" if token is None else self._joiner.push(token)
        before, self._settled = self._settled, self._joiner.settled
        if before and self._settled:
            self._texts[token_id] = text
        return text

    def start_in(self, text: str, token_id: int) -> int:
        """Where the token's own text begins in `text`, the result of pushing it.

        This is 0 unless `text` starts with invalid bytes of earlier tokens.
        """
        data = self._tokenizer.names.bytes(token_id) if "\ufffd" in text else None
        own = (data or b"").decode(errors="replace")
        return len(text) - len(own) if own and text.endswith(own) else 0

    def finish(self) -> str:
        """The text that was held back; nothing may be pushed afterwards."""
        return self._joiner.finish()
