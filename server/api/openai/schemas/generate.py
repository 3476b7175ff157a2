"""Bodies of /v1/chat/completions and /v1/completions: OpenAI's fields and vLLM's extensions.

Validation of a list stops at its first error. An error for each of a million bad items would take
half a minute and gigabytes of memory.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    field_validator,
    model_validator,
)

from server.http.body import Body, Part, failure

INT32 = 2**31 - 1
INT64 = 2**63
MAX_PARTS = 4096  # limit of the messages, and of the text parts in all messages together
MAX_BIASES = 1024
Penalty = Annotated[float, Field(ge=-2, le=2)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
TokenId = Annotated[int, Field(ge=0, le=INT32)]
Count = Annotated[int, Field(ge=1, le=INT32)]
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]


def _shape(value: Any) -> str:
    """Return the union branch that fits the shape of `value`.

    Without a discriminator, a validation error would list the errors of every branch.
    """
    if not isinstance(value, list):
        return "<one>"
    first = value[0] if value else ""
    return {int: "<ids>", list: "<id lists>"}.get(type(first), "<list>")


def _shape_of(allowed: str) -> Discriminator:
    """Return a discriminator for a union without some of the branches of `_shape`.

    `allowed` describes the branches of the union, for the error message.
    """
    return Discriminator(
        _shape, custom_error_type="shape_type", custom_error_message=f"Input should be {allowed}"
    )


Shape = Discriminator(_shape)
OneOrMore = _shape_of("a string or a list of strings")

Stops = Annotated[
    Annotated[Stop, Tag("<one>")]
    | Annotated[list[Stop], Field(fail_fast=True, max_length=4), Tag("<list>")],
    OneOrMore,
]
Prompts = Annotated[
    Annotated[str, Tag("<one>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=64), Tag("<list>")]
    | Annotated[list[TokenIds], Field(fail_fast=True, max_length=64), Tag("<id lists>")],
    Shape,
]


def in_list(given: str | list[str] | list[int] | list[list[int]]) -> list[str] | list[list[int]]:
    """Return `given` as a list of prompts, where it may be a single text or its token ids."""
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], int):
        return [given]
    return given


def _few(value: Any) -> Any:
    """Limit the keys before validation: Field's max_length is checked after all items."""
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise failure("invalid", f"may have at most {MAX_BIASES} keys, not {len(value)}")
    return value


def _none_for_false(value: Any) -> Any:
    return None if value is False else value


class StreamOptions(Part):
    include_usage: bool | None = None


class GenerateBody(Body):
    """The fields that both routes share. A null field has the same meaning as an absent one."""

    ACCEPTED: ClassVar[frozenset[str]] = frozenset(
        (
            *("user", "safety_identifier", "store", "metadata", "service_tier"),
            *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
            "parallel_tool_calls",
        )
    )
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "use_beam_search": (False,),
        **dict.fromkeys(("length_penalty", "typical_p"), (1,)),
        **dict.fromkeys(("bad_words", "allowed_token_ids", "logits_processors"), ([],)),
        **dict.fromkeys(("prompt_embeds", "truncate_prompt_tokens", "structured_outputs"), ()),
        **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
        **dict.fromkeys(("regex", "ebnf", "grammar", "json_schema"), ("",)),
        "response_format": ({"type": "text"},),
    }

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    stop: Stops | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT32)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32)] | None = None
    min_p: Fraction | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[str, Bias], BeforeValidator(_few)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: Annotated[
        Annotated[int, Field(ge=0, le=20)] | None, BeforeValidator(_none_for_false)
    ] = None
    priority: Annotated[int, Field(ge=-INT32, le=INT32)] | None = None
    cache_salt: Annotated[str, StringConstraints(max_length=256)] | None = None

    @property
    def max_new_tokens(self) -> int | None:
        """Maximum tokens of an answer; `max_completion_tokens` takes precedence."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def num_logprobs(self) -> int:
        """The number of alternatives per generated token; -1: no logprobs. As in SamplingParams."""
        raise AssertionError(type(self))

    @property
    def num_prompt_logprobs(self) -> int:
        """The number of alternatives per prompt token; -1: no prompt logprobs."""
        return -1 if self.prompt_logprobs is None else self.prompt_logprobs

    @model_validator(mode="after")
    def _scores_come_whole(self) -> Self:
        if self.stream and self.prompt_logprobs is not None:
            raise failure("unsupported", "is not supported with stream: true", "prompt_logprobs")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class TextPart(Part):
    type: Literal["text"]
    text: str


Content = Annotated[
    Annotated[str, Tag("<one>")] | Annotated[list[TextPart], Field(fail_fast=True), Tag("<list>")],
    _shape_of("a string or a list of text parts"),
]


class ChatMessage(Part):
    """One message. Other fields (audio, refusal, …) are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Annotated[str, StringConstraints(max_length=256)] | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=128)] | None = None
    tool_call_id: Annotated[str, StringConstraints(max_length=256)] | None = None
    reasoning_content: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text_only(cls, value: Any) -> Any:
        for index, part in enumerate(value if isinstance(value, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                raise failure("unsupported", "only text parts are supported", index, "type")
        return value

    @model_validator(mode="after")
    def _needs_content(self) -> ChatMessage:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise failure("invalid", f"a message of role {self.role} needs content", "content")
        return self

    @property
    def text(self) -> str:
        """The text, with one line per text part as in vLLM. OpenAI does not document this."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


def _few_parts(value: Any) -> Any:
    """Limit the text parts of all messages: checking a million would stop every stream for 1 s."""
    messages = value if isinstance(value, list) else []
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = sum(len(content) for content in contents if isinstance(content, list))
    if parts > MAX_PARTS:
        raise failure("invalid", f"may have at most {MAX_PARTS} text parts in total, not {parts}")
    return value


Messages = Annotated[
    list[ChatMessage],
    Field(fail_fast=True, min_length=1, max_length=MAX_PARTS),
    BeforeValidator(_few_parts),
]


class TemplateArguments(Part):
    """The template arguments of a request.

    Only known names with scalar values are allowed, because templates are code: CVE-2025-62426
    exploited arguments that were passed on unchecked.
    """

    model_config = ConfigDict(extra="forbid")

    enable_thinking: bool | None = None
    thinking: bool | None = None
    reasoning_effort: Annotated[str, StringConstraints(max_length=32)] | None = None


def check_ending(body: Any) -> None:
    """Check that the prompt ends either with a new turn or inside the last message, not both."""
    if body.continue_final_message and body.add_generation_prompt:
        message = "needs add_generation_prompt to be false, because it starts no new turn"
        raise failure("invalid", message, "continue_final_message")


class ChatBody(GenerateBody):
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = GenerateBody.UNSUPPORTED | {
        **dict.fromkeys(("tools", "functions", "documents"), ([],)),
        **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
        **dict.fromkeys(("audio", "prediction", "web_search_options", "chat_template"), ()),
        "moderation": (),
        "modalities": (["text"],),
        "echo": (False,),
        "best_of": (1,),
    }
    HINTS: ClassVar[dict[str, str]] = {
        "tools": " Turn off native function calling in the client (in Open WebUI: Legacy).",
    }

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    reasoning_effort: Annotated[str, StringConstraints(max_length=32)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatBody:
        check_ending(self)
        if self.top_logprobs and not self.logprobs:
            raise failure("invalid", "needs logprobs to be true", "top_logprobs")
        return self

    @property
    def num_logprobs(self) -> int:
        return (self.top_logprobs or 0) if self.logprobs else -1


class CompletionBody(GenerateBody):
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
