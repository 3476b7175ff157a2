"""Body of /v1/completions: OpenAI's fields and vLLM's extensions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, Tag, model_validator

from server.api.openai.schemas.fields import INT32, Shape, TokenIds, in_list
from server.api.openai.schemas.generate import GenerateBody
from server.http.body import failure

Prompts = Annotated[
    Annotated[str, Tag("<one>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=64), Tag("<list>")]
    | Annotated[list[TokenIds], Field(fail_fast=True, max_length=64), Tag("<id lists>")],
    Shape,
]


class CompletionBody(GenerateBody):
    OPERATION = "text_completion"
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = GenerateBody.UNSUPPORTED | {"suffix": ("",)}

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, le=INT32)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=16)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise failure("unsupported", "is supported only if it equals n", "best_of")
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            message = "0 needs echo or prompt_logprobs, otherwise the answer would be empty"
            raise failure("invalid", message, "max_tokens")
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
