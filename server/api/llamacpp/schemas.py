"""Bodies of llama.cpp's own API: /completion, /infill and /embedding."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    PlainValidator,
    PrivateAttr,
    WithJsonSchema,
    model_validator,
)

from engine.protocol.sampling_parameters import DEFAULTS
from server.api.llamacpp.bias import BIAS_SCHEMA, Biases, bias_pairs
from server.api.llamacpp.samplers import PENALTIES, SAMPLERS_SCHEMA, sampler_names
from server.api.openai.schemas.chat import ChatBody
from server.api.openai.schemas.embedding import TextsBody
from server.api.openai.schemas.fields import INT32, Between, having, never
from server.api.openai.schemas.generate import MAX_BIASES
from server.api.openai.schemas.prompts import Inputs, Plain, Prompts, plain_list
from server.api.openai.schemas.sampling_fields import (
    SAMPLING_DEFAULTS,
    SamplingBody,
    given_parameters,
)
from server.api.openai.schemas.structured import Schema, parsed
from server.generation.options import GenerationOptions
from server.http.body import Text, failure
from server.text.wanted_grammar import GrammarKind, WantedGrammar

KINDS: dict[str, GrammarKind] = {"json_schema": "json_schema", "grammar": "grammar"}
WHOLE_ANSWER = -1  # of repeat_last_n: penalties look at all tokens

GIVEN = {"not": {"type": "null"}}


def check_progress_is_streamed(wanted: bool | None, stream: bool | None) -> None:
    if wanted and not stream:
        raise failure("unsupported", "needs stream to be true", "return_progress")


class CompletionBody(SamplingBody):
    """llama.cpp's parameters that this server applies; its other samplers are refused if on."""

    ACCEPTED: ClassVar[frozenset[str]] = frozenset(
        (
            # Slots are llama.cpp's own; a context is never shifted here.
            *("id_slot", "n_keep", "n_discard", "n_cache_reuse"),
            # Shapes of samplers whose switches are below.
            *("mirostat_tau", "mirostat_eta", "xtc_threshold", "dynatemp_exponent"),
            *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
            *("adaptive_decay", "penalize_nl"),
            "backend_sampling",  # where llama.cpp samples: the probabilities are the same
        )
    )
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "adaptive_target": (-1,),
        "dry_multiplier": (0,),
        "dynatemp_range": (0,),
        "image_data": ([],),
        "lora": ([],),
        "min_keep": (0,),
        "mirostat": (0,),
        "n_indent": (0,),
        "xtc_probability": (0,),
    }
    DEFAULTS: ClassVar[dict[str, Any]] = SAMPLING_DEFAULTS | {
        "cache_prompt": True,
        "n_cmpl": 1,
        "n_predict": -1,
        "n_probs": 0,
        "t_max_predict_ms": -1,
    }

    prompt: Prompts
    """Texts, token ids, both in one list, or a list of prompts."""
    n_predict: Annotated[int, Between(-1, INT32)] | None = None
    """Most tokens of an answer; −1: as many as the context has room for."""
    n_cmpl: Annotated[int, Between(1, 128)] | None = None
    """Answers per prompt; answer k has seed + k."""
    n_probs: Annotated[int, Between(0, 20)] | None = None
    """Return the logprob of each token, with this many alternatives."""
    post_sampling_probs: bool | None = None
    """`n_probs` returns the probabilities that tokens are drawn by, after temperature and cuts."""
    logit_bias: Annotated[
        Biases | None,
        PlainValidator(lambda value: bias_pairs(value, MAX_BIASES)),
        WithJsonSchema(BIAS_SCHEMA),
    ] = None
    """Added to the logits of tokens or of the tokens of texts; false bans them."""
    grammar: Text | None = None
    """A grammar in GBNF or Lark that the answer follows."""
    json_schema: Schema | Text | None = None
    """A JSON schema that the answer fits."""
    repeat_last_n: Annotated[int, Between(-1, INT32)] | None = None
    """Penalties look at all tokens, so that only −1 is accepted with one."""
    samplers: Annotated[
        tuple[str, ...] | None, PlainValidator(sampler_names), WithJsonSchema(SAMPLERS_SCHEMA)
    ] = None
    """Apply only these, in an order that equals that of `generation_settings`."""
    t_max_predict_ms: Annotated[int, Between(-1, INT32)] | None = None
    """The first line break that comes later than this after the first token ends the answer."""
    cache_prompt: bool | None = None
    """false computes the whole prompt again."""
    return_tokens: bool | None = None
    """Also return the token ids of a whole answer."""
    response_fields: Annotated[list[str], Field(max_length=64)] | None = None
    """Return only these fields; `a/b` is the field b of the object a."""
    timings_per_token: bool | None = None
    """Return `timings` in each part of a stream, too."""
    return_progress: bool | None = None
    """Report each step that computes a part of a prompt in `prompt_progress`; of a stream."""

    _grammar: WantedGrammar | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _one_grammar(self) -> Self:
        given = {name: value for name in KINDS if (value := getattr(self, name))}
        if len(given) > 1:
            raise failure("invalid", "cannot be combined with json_schema", "grammar")
        for name, value in given.items():
            kind = KINDS[name]
            self._grammar = WantedGrammar(name, kind, parsed(kind, value, name))
        return self

    @model_validator(mode="after")
    def _progress_is_streamed(self) -> Self:
        check_progress_is_streamed(self.return_progress, self.stream)
        return self

    @model_validator(mode="after")
    def _penalties_have_no_window(self) -> Self:
        given = given_parameters(self)
        penalised = any(given.get(name, DEFAULTS[name]) != DEFAULTS[name] for name in PENALTIES)
        if self.samplers is not None and "penalties" not in self.samplers:
            return self
        if penalised and self.repeat_last_n not in (None, WHOLE_ANSWER):
            message = "is not supported with a penalty, except −1: penalties look at all tokens"
            raise failure("unsupported", message, "repeat_last_n")
        return self

    @property
    def prompts(self) -> list[Plain]:
        """The prompts as texts, or lists of token ids and texts."""
        return plain_list(self.prompt)

    def options(self, logit_bias: dict[str, float], cache_salt: str) -> GenerationOptions:
        """Return the parameters of the generation, independent of the API."""
        limit = None if self.n_predict in (None, -1) else self.n_predict
        shared = self.sampling_options() | {"cache_salt": cache_salt}
        return GenerationOptions(
            **shared,
            operation="text_completion",
            model=self.model,
            n=self.n_cmpl or 1,
            max_tokens=limit,
            timings=True,
            timings_per_token=bool(self.timings_per_token),
            prompt_progress=bool(self.return_progress),
            logit_bias=logit_bias,
            grammar=self._grammar,
            num_logprobs=self.n_probs or -1,
            final_logprobs=bool(self.post_sampling_probs),
            last_line_after=max(self.t_max_predict_ms or 0, 0) / 1000 or None,
        )


class LlamaChatBody(ChatBody):
    """A chat by llama.cpp's own path."""

    verbose: bool | None = None
    """Return the text of the prompt in `__verbose`; not in a stream."""
    return_progress: bool | None = None
    """Report each step that computes a part of the prompt in `prompt_progress`; of a stream."""

    @model_validator(mode="after")
    def _verbose_is_whole(self) -> Self:
        if self.verbose and self.stream:
            raise failure("unsupported", "is not supported in a stream", "verbose")
        check_progress_is_streamed(self.return_progress, self.stream)
        return self

    def options(self) -> GenerationOptions:
        """Return the parameters of the generation. llama.cpp's answers always have timings."""
        return replace(super().options(), timings=True, prompt_progress=bool(self.return_progress))


class InfillBody(CompletionBody):
    """The answer is the text between two others."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = CompletionBody.UNSUPPORTED | {
        "input_extra": ([],)
    }

    prompt: Annotated[Text, Field()] = ""
    """The beginning of the answer's own line, after `input_prefix`."""
    input_prefix: Text
    """The text before the answer."""
    input_suffix: Text
    """The text behind it."""


class EmbeddingBody(TextsBody):
    """`content` is llama.cpp's name of `input`."""

    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                {"anyOf": [having(input=GIVEN), having(content=GIVEN)]},
                never(input=GIVEN, content=GIVEN),
            ]
        }
    )

    input: Inputs | None = None
    """Texts or their token ids; either this or `content`."""
    content: Inputs | None = None
    """The same."""
    embd_normalize: Literal[-1, 2] | None = None
    """2: vectors of length 1. −1: as the model computes them."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.input is None) == (self.content is None):
            raise failure("invalid", "exactly one of input and content is required", "input")
        return self
