"""Body of /v1/classify, as in vLLM; pairs are an addition."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import ConfigDict, model_validator

from server.api.openai.schemas.embedding import PairsBody, Side, expect_pairs, side_texts
from server.api.openai.schemas.fields import having, never
from server.api.openai.schemas.prompts import Inputs, Plain, plain_list
from server.http.body import failure

ANY: dict[str, Any] = {"not": {"type": "null"}}


class ClassifyBody(PairsBody):
    """Texts or their token ids in `input`, or pairs of texts in `text_1` and `text_2`."""

    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                {"anyOf": [having(input=ANY), having(text_1=ANY, text_2=ANY)]},
                never(input=ANY, text_1=ANY),
                never(input=ANY, text_2=ANY),
            ]
        }
    )
    DEFAULTS: ClassVar[dict[str, Any]] = PairsBody.DEFAULTS | {"add_special_tokens": True}

    input: Inputs | None = None
    """Texts or their token ids. Texts among ids get no special tokens."""
    text_1: Side | None = None
    """The first text of each pair: one, or as many as in `text_2`."""
    text_2: Side | None = None
    """The second text of each pair."""
    add_special_tokens: bool | None = None
    """Add the special tokens of the tokenizer to each text; pairs always have them."""

    @model_validator(mode="after")
    def _one_form(self) -> ClassifyBody:
        sides = {"text_1": self.text_1, "text_2": self.text_2}
        absent = [name for name, side in sides.items() if side is None]
        if self.input is not None:
            if len(absent) < 2:
                raise failure("invalid", "cannot be combined with text_1 and text_2", "input")
            return self
        if absent:
            param = absent[0] if len(absent) == 1 else "input"
            raise failure("invalid", "either input or text_1 and text_2 are required", param)
        expect_pairs(self.first_texts, self.second_texts)
        if self.add_special_tokens is False:
            raise failure("invalid", "must be true for pairs", "add_special_tokens")
        return self

    @property
    def inputs(self) -> list[Plain]:
        return plain_list(self.input)

    @property
    def first_texts(self) -> list[str]:
        return side_texts(self.text_1 or "")

    @property
    def second_texts(self) -> list[str]:
        return side_texts(self.text_2 or "")
