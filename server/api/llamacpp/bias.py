"""`logit_bias` as llama.cpp takes it: of token ids, or of texts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from server.generation.sampling import BANNED, TOKEN_ID
from server.http.body import failure
from server.http.errors import invalid
from server.text.tokenizer import Tokenizer

Biases = list[tuple[str, float]]  # a token id or a text, and what is added to its logits
VALUE = {"anyOf": [{"type": "number", "minimum": -100, "maximum": 100}, {"const": False}]}
BIAS_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "object", "additionalProperties": VALUE},
        {
            "type": "array",
            "items": {
                "type": "array",
                "prefixItems": [{"type": ["integer", "string"]}, VALUE],
                "minItems": 2,
                "maxItems": 2,
            },
        },
        {"type": "null"},
    ]
}


def bias_pairs(value: Any, most: int) -> Biases | None:
    """Return the biases of an object, or of a list of pairs. Raises a validation error."""
    if value is None:
        return None
    items: Iterable[Any] = value if isinstance(value, list) else ()
    if isinstance(value, dict):
        items = list(value.items())
    elif not isinstance(value, list):
        raise failure("invalid", "must be an object or a list of pairs")
    found = [_pair(item) for item in items]
    if len(found) > most:
        raise failure("invalid", f"may have at most {most} entries, not {len(found)}")
    return found


def _pair(item: Any) -> tuple[str, float]:
    if not isinstance(item, list | tuple) or len(item) != 2:
        raise failure("invalid", "must hold pairs of a token and its bias")
    token, bias = item
    if isinstance(token, bool) or not isinstance(token, int | str) or token == "":
        raise failure("invalid", "must name token ids or texts")
    if bias is False:
        return str(token), BANNED
    known = isinstance(bias, int | float) and not isinstance(bias, bool) and math.isfinite(bias)
    if not known or not -100 <= bias <= 100:
        raise failure("invalid", "must have biases from -100 to 100, or false")
    return str(token), float(bias)


def bias_by_token(tokenizer: Tokenizer, biases: Biases, most: int) -> dict[str, float]:
    """Return the biases by token id. That of a text belongs to each of its tokens.

    Raises a 400 ApiError if the texts have more than `most` tokens.
    """
    found: dict[str, float] = {}
    for name, bias in biases:
        tokens = [name]
        if not TOKEN_ID.fullmatch(name):
            tokens = [str(token) for token in tokenizer.encode(name, add_special_tokens=False)]
        found.update(dict.fromkeys(tokens, bias))
        if len(found) > most:
            raise invalid("logit_bias", f"logit_bias names more than {most} tokens.")
    return found
