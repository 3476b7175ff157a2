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
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from server.api.openai.schemas.fields import (
    INT32,
    INT64,
    INTEGER,
    TRUE,
    Between,
    Count,
    OneOrMore,
    Priority,
    TokenId,
    never,
)
from server.api.openai.schemas.structured import (
    Choices,
    ResponseFormat,
    Schema,
    StructuredOutputs,
    of_response_format,
    parsed,
)
from server.generation.grammar import GrammarKind, WantedGrammar
from server.generation.options import GenerationOptions, Operation
from server.http.body import Body, Part, failure, few
from server.http.openapi import TOKEN_ID

LLAMA_CPP_NAMES = ("n_predict", "num_predict")  # of max_tokens, also Ollama's; -1 is no limit
# max_new_tokens is the name of TGI and SGLang.
MAX_TOKENS_NAMES = Field(
    validation_alias=AliasChoices("max_tokens", *LLAMA_CPP_NAMES, "max_new_tokens")
)
MAX_BIASES = 1024
MAX_STOPS = 32
MAX_BAD_WORDS = 128
Penalty = Annotated[float, Field(ge=-2, le=2)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
BadWord = Annotated[str, StringConstraints(min_length=1, max_length=64)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Stops = Annotated[
    Annotated[Stop, Tag("<one>")]
    | Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOPS), Tag("<list>")],
    OneOrMore,
]


OTHER_NAMES: dict[str, GrammarKind] = {
    **dict.fromkeys(("guided_json", "json_schema"), "json_schema"),
    **dict.fromkeys(("guided_regex", "regex"), "regex"),
    "guided_choice": "choice",
    **dict.fromkeys(("guided_grammar", "grammar", "ebnf"), "grammar"),
}
NOT_STREAMED = never(stream=TRUE, prompt_logprobs=INTEGER)


# The values of absent parameters of sampling, if the checkpoint has no defaults of its own.
SAMPLING_DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "priority": 0,
}


class StreamOptions(Part):
    include_usage: bool | None = None
    """Send the numbers of tokens in the last chunk."""
    continuous_usage_stats: bool | None = None
    """Send the numbers of tokens so far in each chunk."""


class GenerateBody(Body):
    """The fields that both routes share. A null field has the same meaning as an absent one."""

    ACCEPTED: ClassVar[frozenset[str]] = frozenset(
        (
            *("user", "safety_identifier", "store", "metadata", "service_tier"),
            *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
            "guided_decoding_backend",
        )
    )
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "use_beam_search": (False,),
        **dict.fromkeys(("length_penalty", "typical_p"), (1,)),
        "logits_processors": ([],),
        "prompt_embeds": (),
    }

    DEFAULTS: ClassVar[dict[str, Any]] = SAMPLING_DEFAULTS | {
        "n": 1,
        "min_tokens": 0,
        "skip_special_tokens": True,
    }
    OPERATION: ClassVar[Operation]
    DEFAULT_MAX_TOKENS: ClassVar[int | None] = None  # as in OpenAI's API
    _grammar: WantedGrammar | None = PrivateAttr(None)

    model_config = ConfigDict(json_schema_extra={"allOf": [NOT_STREAMED]})

    stream: bool | None = None
    """Send the answer as server-sent events while it is made."""
    stream_options: StreamOptions | None = None
    """Options of a stream."""
    n: Annotated[int, Between(1, 128)] | None = None
    """Choices per prompt; choice k has seed + k. Prompts and `n` make at most 2,048 choices."""
    # At least n, which JSON Schema cannot say.
    best_of: SkipJsonSchema[Annotated[int, Between(1, 128)] | None] = None
    stop: Stops | None = None
    """Texts before which the answer ends."""
    seed: Annotated[int, Between(-INT64, INT64)] | None = None
    """Seed of the noise; −1 is the same as none: random."""
    # `truncate` is TGI's name.
    truncate_prompt_tokens: Count | Literal[-1] | None = Field(
        None, validation_alias=AliasChoices("truncate_prompt_tokens", "truncate")
    )
    """Read only the last tokens of the prompt; −1 leaves room for `max_tokens`. Not with `echo`."""
    max_tokens: Annotated[Count | None, MAX_TOKENS_NAMES] = None
    """Most tokens of an answer. More than the context has room for is lowered to that."""
    max_completion_tokens: Count | None = None
    """OpenAI's newer name of `max_tokens`; it takes precedence."""
    min_tokens: Annotated[int, Between(0, INT32)] | None = None
    """No end token or stop text ends the answer before; at most `max_tokens`."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0 always takes the most likely token."""
    top_p: Fraction | None = None
    """Keep the most likely tokens up to this probability, after temperature."""
    top_k: Annotated[int, Between(-1, INT32)] | None = None
    """Keep this many of the most likely tokens; 0 and −1 keep all."""
    min_p: Fraction | None = None
    """Drop tokens below this share of the most likely token's probability."""
    presence_penalty: Penalty | None = None
    """Subtracted once from the logit of each token in the answer."""
    frequency_penalty: Penalty | None = None
    """Subtracted from a token's logit for each time it is in the answer."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = Field(
        None, validation_alias=AliasChoices("repetition_penalty", "repeat_penalty")
    )
    """Divides or multiplies the logits of tokens of prompt and answer; 1 is neutral."""
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
    guided_json: SkipJsonSchema[Schema | str | None] = None
    json_schema: SkipJsonSchema[Schema | str | None] = None
    guided_regex: SkipJsonSchema[str | None] = None
    regex: SkipJsonSchema[str | None] = None
    guided_choice: SkipJsonSchema[Choices | None] = None
    guided_grammar: SkipJsonSchema[str | None] = None
    grammar: SkipJsonSchema[str | None] = None
    ebnf: SkipJsonSchema[str | None] = None
    guided_whitespace_pattern: SkipJsonSchema[str | None] = None
    ignore_eos: bool | None = None
    """Continue after the checkpoint's end tokens."""
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
    timings: bool | None = None
    """Return numbers and times of tokens in `timings`, with llama.cpp's names."""
    timings_per_token: bool | None = None
    """Return `timings` in each chunk of a stream, too."""
    prompt_logprobs: Annotated[int, Between(0, 20)] | Literal[False] | None = None
    """Return the logprob of each prompt token, with this many alternatives. No streams."""
    priority: Priority | None = None
    """A lower value is served earlier."""
    cache_salt: Annotated[str, StringConstraints(max_length=256)] | None = None
    """Cached prefixes are shared only between requests with the same salt."""

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
        """Whether each chunk of a stream has the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def options(self) -> GenerationOptions:
        """Return the parameters of the generation, independent of the API."""
        return GenerationOptions(
            operation=self.OPERATION,
            model=self.model,
            stream=bool(self.stream),
            n=self.n or 1,
            best_of=self.best_of,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
            max_tokens=self.max_new_tokens,
            default_max_tokens=self.DEFAULT_MAX_TOKENS,
            min_tokens=self.min_tokens or 0,
            stop=self.stops,
            stop_token_ids=self.stop_token_ids or (),
            ignore_eos=bool(self.ignore_eos),
            timings=bool(self.timings),
            timings_per_token=bool(self.timings_per_token),
            include_stop=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
            # The largest is allowed because a float, as in most JSON tools, cannot say 2^63 - 1.
            seed=None if self.seed is None else min(self.seed, INT64 - 1),
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self.logit_bias or {},
            allowed_token_ids=self.allowed_token_ids or (),
            bad_words=self.bad_words or (),
            grammar=self._grammar,
            num_logprobs=self.num_logprobs,
            num_prompt_logprobs=self.num_prompt_logprobs,
        )
