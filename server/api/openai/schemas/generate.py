"""GenerateBody: the fields that chats and completions share, OpenAI's and vLLM's extensions."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from server.api.openai.schemas.fields import (
    INT32,
    INTEGER,
    LIST,
    TRUE,
    Alternatives,
    Between,
    Count,
    TokenId,
    TruncationSide,
    having,
    never,
)
from server.api.openai.schemas.sampling_fields import (
    SAMPLING_DEFAULTS,
    CacheOptions,
    SamplingBody,
)
from server.api.openai.schemas.structured import (
    Choices,
    ResponseFormat,
    Schema,
    StructuredOutputs,
    of_response_format,
    parsed,
)
from server.generation.options import GenerationOptions, Operation
from server.http.body import Part, Text, failure, few
from server.http.openapi import TOKEN_ID
from server.text.wanted_grammar import GrammarKind, WantedGrammar

LLAMA_CPP_NAMES = ("n_predict", "num_predict")  # of max_tokens, also Ollama's; -1 is no limit
# max_new_tokens is the name of TGI and SGLang.
MAX_TOKENS_NAMES = Field(
    validation_alias=AliasChoices("max_tokens", *LLAMA_CPP_NAMES, "max_new_tokens")
)
MAX_BIASES = 1024
MAX_BAD_WORDS = 128
MAX_NAMED = 128  # tokens whose logprobs a request names
# The names of vLLM and llama.cpp. -1 is no limit.
BUDGET_NAMES = Field(
    validation_alias=AliasChoices(
        "thinking_token_budget",
        "thinking_budget_tokens",
        "reasoning_budget_tokens",
        "reasoning_budget",
    )
)
BadWord = Annotated[str, StringConstraints(min_length=1, max_length=64)]
Bias = Annotated[float, Field(ge=-100, le=100)]


OTHER_NAMES: dict[str, GrammarKind] = {
    **dict.fromkeys(("guided_json", "json_schema"), "json_schema"),
    **dict.fromkeys(("guided_regex", "regex"), "regex"),
    "guided_choice": "choice",
    **dict.fromkeys(("guided_grammar", "grammar", "ebnf"), "grammar"),
}
NOT_STREAMED = never(stream=TRUE, prompt_logprobs=INTEGER)
NAMED_LOGPROBS: dict[str, Any] = {
    "anyOf": [
        never(logprob_token_ids=LIST),
        having(logprobs={"type": ["boolean", "integer"], "not": {"const": False}}),
    ]
}
OF_STREAMS: dict[str, Any] = {
    "anyOf": [having(stream=TRUE), {"properties": {"stream_options": {"type": "null"}}}]
}
SHARED_RULES = [NOT_STREAMED, NAMED_LOGPROBS, OF_STREAMS]


class StreamOptions(Part):
    include_usage: bool | None = None
    """Send the numbers of tokens in the last chunk."""
    continuous_usage_stats: bool | None = None
    """With `include_usage`: send the numbers of tokens so far in each chunk, too."""


class GenerateBody(SamplingBody):
    """The fields that both routes share. A null field has the same meaning as an absent one."""

    ACCEPTED: ClassVar[frozenset[str]] = frozenset(
        (
            *("user", "safety_identifier", "store", "metadata", "service_tier"),
            *("prompt_cache_key", "prompt_cache_retention"),
            "guided_decoding_backend",
        )
    )
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "use_beam_search": (False,),
        "length_penalty": (1,),
        "logits_processors": ([],),
        "prompt_embeds": (),
    }

    DEFAULTS: ClassVar[dict[str, Any]] = SAMPLING_DEFAULTS | {
        "n": 1,
        "min_tokens": 0,
        "truncation_side": "left",
        "skip_special_tokens": True,
    }
    OPERATION: ClassVar[Operation]
    DEFAULT_MAX_TOKENS: ClassVar[int | None] = None  # as in OpenAI's API
    _grammar: WantedGrammar | None = PrivateAttr(None)

    model_config = ConfigDict(json_schema_extra={"allOf": [*SHARED_RULES]})

    prompt_cache_options: CacheOptions | None = None
    """No effect: prefixes are always cached."""
    stream_options: StreamOptions | None = None
    """Options of a stream; needs `stream`, as in OpenAI's API."""
    n: Annotated[int, Between(1, 128)] | None = None
    """Choices per prompt; choice k has seed + k. Prompts and `n` make at most 2,048 choices."""
    # At least n, which JSON Schema cannot say.
    best_of: SkipJsonSchema[Annotated[int, Between(1, 128)] | None] = None
    """Choices to generate, n to 128; those of the best mean logprob are returned. Not streamed."""
    # `truncate` is TGI's name.
    truncate_prompt_tokens: Count | Literal[-1] | None = Field(
        None, validation_alias=AliasChoices("truncate_prompt_tokens", "truncate")
    )
    """Read only the last tokens of the prompt; −1 leaves room for `max_tokens`. Not with `echo`."""
    truncation_side: TruncationSide | None = None
    """The side that `truncate_prompt_tokens` cuts off; `right` keeps the first tokens."""
    max_tokens: Annotated[Count | None, MAX_TOKENS_NAMES] = None
    """Most tokens of an answer. More than the context has room for is lowered to that."""
    max_completion_tokens: Count | None = None
    """OpenAI's newer name of `max_tokens`; it takes precedence."""
    min_tokens: Annotated[int, Between(0, INT32)] | None = None
    """No end token or stop text ends the answer before; at most `max_tokens`, lowered like it."""
    logit_bias: Annotated[
        Annotated[dict[str, Bias], BeforeValidator(partial(few, most=MAX_BIASES, noun="keys"))]
        | None,
        WithJsonSchema(
            {
                "anyOf": [
                    {
                        "type": "object",
                        "propertyNames": {"title": TOKEN_ID, "pattern": "^(0|[1-9][0-9]{0,8})$"},
                        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                        "maxProperties": MAX_BIASES,
                    },
                    {"type": "null"},
                ]
            }
        ),
    ] = None
    """Added to the logits of tokens, by token id."""
    response_format: ResponseFormat | None = None
    """The answer is text, a JSON object, or JSON that fits a schema."""
    structured_outputs: StructuredOutputs | None = None
    """vLLM's form: the answer follows a schema, pattern, choice or grammar."""
    # The same under the names of vLLM until 0.11 (guided_*), SGLang (regex, ebnf, json_schema) and
    # llama.cpp (grammar, json_schema).
    guided_json: SkipJsonSchema[Schema | Text | None] = None
    """As `structured_outputs.json`."""
    json_schema: SkipJsonSchema[Schema | Text | None] = None
    """As `structured_outputs.json`."""
    guided_regex: SkipJsonSchema[Text | None] = None
    """As `structured_outputs.regex`."""
    regex: SkipJsonSchema[Text | None] = None
    """As `structured_outputs.regex`."""
    guided_choice: SkipJsonSchema[Choices | None] = None
    """As `structured_outputs.choice`."""
    guided_grammar: SkipJsonSchema[Text | None] = None
    """As `structured_outputs.grammar`."""
    grammar: SkipJsonSchema[Text | None] = None
    """As `structured_outputs.grammar`."""
    ebnf: SkipJsonSchema[Text | None] = None
    """As `structured_outputs.grammar`."""
    guided_whitespace_pattern: SkipJsonSchema[str | None] = None
    """As `structured_outputs.whitespace_pattern`."""
    thinking_token_budget: Annotated[Annotated[int, Between(-1, INT32)] | None, BUDGET_NAMES] = None
    """Most tokens of the model's thoughts; then their closing mark is written. −1: no limit."""
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=1024)] | None = None
    """Token ids that end the answer."""
    allowed_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=4096)] | None = (
        None
    )
    """No other token is generated; include the end token, too."""
    bad_words: Annotated[list[BadWord], Field(fail_fast=True, max_length=MAX_BAD_WORDS)] | None = (
        None
    )
    """Texts that are not generated, with or without a space before them."""
    include_stop_str_in_output: bool | None = None
    """Keep the stop text or end token in the text."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text."""
    return_token_ids: bool | None = None
    """Also return the token ids of prompt and answer."""
    return_tokens_as_token_ids: bool | None = None
    """Name tokens in `logprobs` by their ids, as `token_id:7`; default: as the flag says."""
    logprob_token_ids: (
        Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_NAMED)] | None
    ) = None
    """Return the logprobs of these tokens in place of the likeliest; needs `logprobs`."""
    timings: bool | None = None
    """Return numbers and times of tokens in `timings`, with llama.cpp's names."""
    timings_per_token: bool | None = None
    """Return `timings` in each chunk of a stream, too."""
    prompt_logprobs: Alternatives | Literal[False] | None = None
    """Return the logprob of each prompt token, with this many alternatives. No streams."""

    @property
    def max_new_tokens(self) -> int | None:
        """Maximum tokens of an answer; `max_completion_tokens` takes precedence."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def thought_budget(self) -> int | None:
        """Maximum tokens of the thoughts; None: no limit."""
        return None if self.thinking_token_budget == -1 else self.thinking_token_budget

    @property
    def num_logprobs(self) -> int:
        """The number of alternatives per generated token; -1: no logprobs. As in SamplingParams."""
        raise AssertionError(type(self))

    @property
    def num_prompt_logprobs(self) -> int:
        """The number of alternatives per prompt token; -1: no prompt logprobs."""
        return int(self.prompt_logprobs or 0) if self.asks_prompt_logprobs else -1

    @property
    def asks_prompt_logprobs(self) -> bool:
        return self.prompt_logprobs is not None and self.prompt_logprobs is not False

    @model_validator(mode="after")
    def _prompt_logprobs_need_whole_answer(self) -> Self:
        if self.stream and self.asks_prompt_logprobs:
            raise failure("unsupported", "is not supported with stream: true", "prompt_logprobs")
        return self

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise failure("invalid", "is only allowed with stream: true", "stream_options")
        return self

    @model_validator(mode="after")
    def _named_logprobs_need_logprobs(self) -> Self:
        if self.logprob_token_ids and self.num_logprobs < 0:
            raise failure("invalid", "needs logprobs", "logprob_token_ids")
        return self

    @model_validator(mode="after")
    def _best_of_has_candidates(self) -> Self:
        n = self.n or 1
        if self.best_of is None or self.best_of == n:
            return self
        if self.best_of < n:
            raise failure("invalid", f"must be at least n, which is {n}", "best_of")
        if self.stream:
            raise failure("unsupported", "above n is not supported with stream: true", "best_of")
        return self

    @model_validator(mode="before")
    @classmethod
    def _no_limit(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        endless = [name for name in LLAMA_CPP_NAMES if value.get(name) == -1]
        return {k: v for k, v in value.items() if k not in endless} if endless else value

    @model_validator(mode="after")
    def _one_grammar(self) -> Self:
        wanted = self._wanted_grammars()
        if len(wanted) > 1:
            first, second = wanted[0].param, wanted[1].param
            raise failure("invalid", f"cannot be combined with {first}", second)
        self._grammar = wanted[0] if wanted else None
        return self

    def _wanted_grammars(self) -> list[WantedGrammar]:
        wanted = []
        if self.response_format and (asked := of_response_format(self.response_format)):
            wanted.append(asked)
        if self.structured_outputs:
            wanted.append(self.structured_outputs.wanted("structured_outputs"))
        for name, kind in OTHER_NAMES.items():
            if value := getattr(self, name):  # empty texts are some clients' defaults
                space = self.guided_whitespace_pattern
                wanted.append(WantedGrammar(name, kind, parsed(kind, value, name), space))
        return wanted

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of a stream has the usage so far: as in vLLM, only with the last."""
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    def options(self) -> GenerationOptions:
        """Return the parameters of the generation, independent of the API."""
        named = list(dict.fromkeys(self.logprob_token_ids or ()))
        return GenerationOptions(
            **self.sampling_options(),
            operation=self.OPERATION,
            model=self.model,
            n=self.n or 1,
            best_of=self.best_of,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            keeps_start=self.truncation_side == "right",
            max_tokens=self.max_new_tokens,
            default_max_tokens=self.DEFAULT_MAX_TOKENS,
            min_tokens=self.min_tokens or 0,
            stop_token_ids=self.stop_token_ids or (),
            timings=bool(self.timings),
            timings_per_token=bool(self.timings_per_token),
            include_stop=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
            logit_bias=self.logit_bias or {},
            allowed_token_ids=self.allowed_token_ids or (),
            bad_words=self.bad_words or (),
            grammar=self._grammar,
            thought_budget=self.thought_budget,
            num_logprobs=len(named) if named else self.num_logprobs,
            logprob_token_ids=named,
            num_prompt_logprobs=self.num_prompt_logprobs,
        )
