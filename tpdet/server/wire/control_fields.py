"""What the fields of control verbs have in common."""

import msgspec


class ControlFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """No fields; the base of those of a verb that has some."""
