"""Bodies of Ollama's API. A member that is null or an empty string counts as absent."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, StringConstraints, model_validator

from server.api.openai.schemas.fields import Alternatives, Effort
from server.api.openai.schemas.structured import ANY_OBJECT, Schema
from server.generation.chat_prompt import Chat
from server.generation.options import GenerationOptions, Operation
from server.generation.thinking import Thinking
from server.http.body import Body, Text, check_supported, failure
from server.ollama.messages import Images, Messages, OllamaMessage, Tools, chat_of
from server.ollama.options import NO_OPTIONS, Options, filled
from server.text.wanted_grammar import WantedGrammar

KeepAlive = float | Annotated[str, StringConstraints(max_length=64)]


def _json_or_schema(value: Any) -> Any:
    if isinstance(value, str) and value != "json":
        raise failure("invalid", 'must be "json" or a JSON schema')
    return value


class OllamaBody(Body):
    """The fields that all bodies share."""

    keep_alive: KeepAlive | None = None
    """No effect: the model stays loaded. 0 without a prompt, which unloads, is refused."""

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, value: Any) -> Any:
        return filled(value)

    @property
    def unloads(self) -> bool:
        """Whether a body without a prompt asks to unload the model."""
        given = self.keep_alive
        return given is not None and str(given).rstrip("smh") in ("0", "0.0")


class GenerationBody(OllamaBody):
    """The fields of /api/chat and /api/generate."""

    OPERATION: ClassVar[Operation] = "chat"
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "truncate": (False,),
        "shift": (False,),
        **dict.fromkeys(("width", "height", "steps"), (0,)),  # of generated images
    }
    HINTS: ClassVar[dict[str, str]] = dict.fromkeys(
        ("truncate", "shift"), " A prompt beyond the context is an error; it is never cut."
    )
    DEFAULTS: ClassVar[dict[str, Any]] = {"stream": True, "top_logprobs": 0}

    stream: bool | None = None
    """Send the answer as lines of JSON while it is made."""
    options: Options | None = None
    """Parameters of sampling, and the most tokens of the answer."""
    format: Annotated[Literal["json"] | Schema | None, BeforeValidator(_json_or_schema)] = None
    """`json`: the answer is a JSON object. A JSON schema: the answer fits it."""
    think: bool | Effort | None = None
    """Whether the model thinks before its answer, or how much, such as `low`."""
    logprobs: bool | None = None
    """Return the logprob of each token."""
    top_logprobs: Alternatives | None = None
    """Alternatives per token; needs `logprobs`."""

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, value: Any) -> Any:
        options = value.get("options") if isinstance(value, dict) else None
        if not isinstance(options, dict):
            return value
        options = filled(options)
        check_supported(Options, options)
        return value | {"options": options}

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise failure("invalid", "needs logprobs to be true", "top_logprobs")
        return self

    @property
    def ignored(self) -> list[str]:
        """Names of unknown fields, also of `options`; bounded, and safe for a header."""
        return [*super().ignored, *(f"options.{name}" for name in self.given_options.ignored)]

    @property
    def given_options(self) -> Options:
        return self.options or NO_OPTIONS

    @property
    def is_streamed(self) -> bool:
        return self.stream is not False

    @property
    def thinking(self) -> Thinking:
        if isinstance(self.think, str):
            return Thinking(self.think)
        return Thinking(is_on=self.think)

    def generation_options(self) -> GenerationOptions:
        """Return the parameters of the generation, independent of the API."""
        given = self.given_options
        shared = given.sampling_options() | {"stream": self.is_streamed}
        return GenerationOptions(
            **shared,
            operation=self.OPERATION,
            model=self.model,
            max_tokens=given.max_tokens,
            timings=True,
            grammar=self._grammar(),
            num_logprobs=(self.top_logprobs or 0) if self.logprobs else -1,
        )

    def _grammar(self) -> WantedGrammar | None:
        if self.format is None:
            return None
        schema = ANY_OBJECT if self.format == "json" else self.format
        return WantedGrammar("format", "json_schema", schema)


class ChatBody(GenerationBody):
    """The body of /api/chat."""

    messages: Messages | None = None
    """The conversation. Without one, the answer says that the model is loaded."""
    tools: Tools | None = None
    """Functions that the model may call."""

    def chat(self) -> Chat:
        """Return the conversation for the model's template. Takes long for a long body."""
        return chat_of(self.messages or (), self.thinking, self.tools or ())


class GenerateBody(GenerationBody):
    """The body of /api/generate."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = GenerationBody.UNSUPPORTED | {
        "context": ([], "")
    }
    HINTS: ClassVar[dict[str, str]] = GenerationBody.HINTS | {
        "context": " Send the conversation to /api/chat."
    }

    prompt: Text | None = None
    """The text to answer. Without one, the answer says that the model is loaded."""
    suffix: Text | None = None
    """The text after the answer, if the model has tokens for fill-in-the-middle."""
    system: Text | None = None
    """The system message."""
    template: Annotated[str, StringConstraints(max_length=64)] | None = None
    """Only `{{ .Prompt }}`, which is `raw`: the model's own template is used otherwise."""
    images: Images | None = None
    """Pictures in base64, before the prompt."""
    raw: bool | None = None
    """Continue the prompt as it is, without the chat template."""

    def chat(self) -> Chat:
        """Return the conversation of a prompt that is not raw."""
        messages = [OllamaMessage(role="user", content=self.prompt, images=self.images)]
        if self.system is not None:
            messages.insert(0, OllamaMessage(role="system", content=self.system))
        return chat_of(messages, self.thinking)
