"""Body of /v1/completions: OpenAI's fields and vLLM's extensions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, Tag, model_validator
from pydantic.json_schema import SkipJsonSchema

from server.api.openai.schemas.fields import (
    INT32,
    INTEGER,
    TRUE,
    Alternatives,
    Between,
    Shape,
    TokenIds,
    having,
    in_list,
    never,
)
from server.api.openai.schemas.generate import MAX_TOKENS_NAMES, SHARED_RULES, GenerateBody
from server.generation.limits import MAX_CHOICES
from server.http.body import Text, failure

Prompts = Annotated[
    Annotated[Text, Tag("<one>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[
        list[Text], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES), Tag("<list>")
    ]
    | Annotated[
        list[TokenIds],
        Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES),
        Tag("<id lists>"),
    ],
    Shape,
]


# An answer of 0 tokens must contain something else.
NOT_EMPTY: dict[str, Any] = {
    "anyOf": [never(max_tokens={"const": 0}), having(echo=TRUE), having(prompt_logprobs=INTEGER)]
}

# An echo is the whole prompt as a text.
WHOLE_ECHO = [never(echo=TRUE, truncate_prompt_tokens=INTEGER)]


class CompletionBody(GenerateBody):
    OPERATION = "text_completion"
    DEFAULT_MAX_TOKENS = 16
    DEFAULTS: ClassVar[dict[str, Any]] = GenerateBody.DEFAULTS | {"max_tokens": DEFAULT_MAX_TOKENS}

    model_config = ConfigDict(json_schema_extra={"allOf": [*SHARED_RULES, NOT_EMPTY, *WHOLE_ECHO]})

    prompt: Prompts
    """Texts or their token ids; an empty text begins a new document."""
    max_tokens: Annotated[Annotated[int, Between(0, INT32)] | None, MAX_TOKENS_NAMES] = None
    """As for chats; 0 only with `echo` or `prompt_logprobs`."""
    logprobs: Alternatives | None = None
    """Alternatives per token; with `echo` also of the prompt."""
    echo: bool | None = None
    """The text begins with the prompt."""
    # Few models know it, so the schema of all models leaves it out.
    suffix: SkipJsonSchema[Text | None] = None
    """Text that follows the answer; only for models with tokens for fill-in-the-middle."""

    @model_validator(mode="after")
    def _consistent(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.echo and not self.asks_prompt_logprobs:
            message = "0 needs echo or prompt_logprobs, otherwise the answer would be empty"
            raise failure("invalid", message, "max_tokens")
        if self.echo and self.suffix:
            raise failure("unsupported", "is not supported with echo", "suffix")
        if self.echo and self.truncate_prompt_tokens is not None:
            raise failure("unsupported", "is not supported with echo", "truncate_prompt_tokens")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        return in_list(self.prompt)

    @property
    def num_logprobs(self) -> int:
        return -1 if self.logprobs is None else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int:
        return max(super().num_prompt_logprobs, self.num_logprobs if self.echo else -1)
