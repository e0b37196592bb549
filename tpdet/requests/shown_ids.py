"""The ids that an answer shows: functions of its request, so that equal requests show equal ids.

Agents send answers back, and some chat templates print ids: one that was drawn would change the
next prompt. What is logged, aborted or recorded is the request's own random id instead.
"""

import string
import struct
from typing import NamedTuple

import blake3

_LETTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
_DOMAIN = b"tpdet-shown-1\n"


class IdForm(NamedTuple):
    """A prefix, and so many letters and digits behind it."""

    prefix: str
    size: int


CALL = IdForm("call_", 24)
CHAT = IdForm("chatcmpl-", 32)
RESPONSE, MESSAGE = IdForm("resp_", 48), IdForm("msg_", 48)
REASONING = IdForm("rs_", 48)
FUNCTION_CALL, CUSTOM_CALL = IdForm("fc_", 48), IdForm("ctc_", 48)
TOOL_USE = IdForm("toolu_", 24)
SIGNATURE = IdForm("", 64)
FAMILY_CALLS = {"mistral": IdForm("", 9)}
"""The forms of calls' ids in families whose templates refuse others, by the family's name."""


def shown_id(form: IdForm, digest: str, *numbers: int) -> str:
    """An id of what has these numbers in the answer to a request; digest: of the request.

    The last digits, in base 62 and the lowest first, of the number that 64 bytes of BLAKE3 are,
    little-endian, over the text `tpdet-shown-1`, a line feed, the prefix, a line feed, the digest
    (32 bytes) and the numbers (8 bytes each, little-endian).
    """
    hashed = blake3.blake3(_DOMAIN + form.prefix.encode() + b"\n" + bytes.fromhex(digest))
    hashed.update(struct.pack(f"<{len(numbers)}Q", *numbers))
    number, letters = int.from_bytes(hashed.digest(64), "little"), []
    for _ in range(form.size):
        number, letter = divmod(number, len(_LETTERS))
        letters.append(_LETTERS[letter])
    return form.prefix + "".join(letters)


class ShownIds(NamedTuple):
    """What the answer to one request shows; `digest` is the request's, `family` that of its calls.

    An id that the model wrote is that of its call.
    """

    digest: str
    family: str = ""

    @property
    def chat(self) -> str:
        """The id of the whole answer."""
        return shown_id(CHAT, self.digest)

    def call(self, choice: int, index: int) -> str:
        """The id of a choice's call."""
        return shown_id(FAMILY_CALLS.get(self.family, CALL), self.digest, choice, index)
