"""An owner is the API key that asked for what a server keeps: answers and receipts."""

import blake3
from starlette.types import Scope

from tpdet.server.front.door import API_KEY, header
from tpdet.server.settings.keys import sent_key

_DOMAIN = b"tpdet-owner-1\n"


def owner_of(scope: Scope) -> str:
    """The owner of what a request makes: BLAKE3 (64 hex digits) of the API key it came with.

    Empty where its listener has no keys: whatever key a client sends, all are one owner. Unlike
    the tenant's salt it outlives the run, so it may be written down. What is kept of one owner
    does not exist for another.
    """
    if not scope["tpdet"].tenant_salt:
        return ""
    key = sent_key(header(scope, b"authorization"), header(scope, API_KEY))
    return blake3.blake3(_DOMAIN + key).hexdigest()
