"""Real texts for `tpdet bench drafts`: code that is edited, JSON by a schema, chat."""

import json
from typing import NamedTuple

_CODE = '''def read_orders(path):
    """Return the orders of a file, by customer."""
    orders = {}
    with open(path) as file:
        for line in file:
            customer, item, price = line.strip().split(",")
            total = orders.setdefault(customer, {"items": [], "total": 0.0})
            total["items"].append(item)
            total["total"] += float(price)
    return orders


def largest_order(orders):
    """Return the customer whose order has the largest total."""
    best = None
    for customer, order in orders.items():
        if best is None or order["total"] > orders[best]["total"]:
            best = customer
    return best
'''
_EDITS = (
    "the variable `customer` renamed to `client`",
    "a type hint for the parameter of each function",
)
_SCHEMA = {
    "type": "object",
    "properties": {
        "animals": {
            "type": "array",
            "minItems": 3,
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 20},
                    "number_of_legs": {"type": "integer", "minimum": 0, "maximum": 100},
                    "habitat": {"enum": ["forest", "ocean", "desert", "grassland"]},
                    "can_fly": {"type": "boolean"},
                },
                "required": ["name", "number_of_legs", "habitat", "can_fly"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["animals"],
    "additionalProperties": False,
}
_QUESTIONS = ("Why is the sky blue?", "How do I make a cup of tea? Give me the steps.")
_DESCRIBE = ("Describe three animals of Africa.", "Describe three animals that children like.")


class Text(NamedTuple):
    """A request: a question for a chat, or text to go on with; its schema."""

    question: str = ""
    beginning: str = ""
    schema: str | None = None


def edit(what: str) -> Text:
    """Code, and the beginning of its edited copy."""
    return Text(
        beginning=f"Some Python code:\n\n```python\n{_CODE}```\n\n"
        f"The same code with {what}, and nothing else changed:\n\n```python\n"
    )


TEXTS = {
    "code edits": tuple(edit(what) for what in _EDITS),
    "JSON by schema": tuple(Text(it, schema=json.dumps(_SCHEMA)) for it in _DESCRIBE),
    "chat": tuple(Text(it) for it in _QUESTIONS),
}
"""The requests of each kind."""
