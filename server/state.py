"""AppState: the objects that every request uses, created once by `create_app`."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from starlette.requests import Request

from engine.client.interface import EngineClient
from engine.config import EngineConfig
from engine.errors import EngineUnavailableError
from engine.protocol.generate import Grammar
from engine.protocol.ready import Ready
from server.adapters import AdapterRegistry, ServedAdapter
from server.config import ServerConfig
from server.http.body import BodyTurn
from server.http.errors import ApiError, invalid, to_api_error
from server.http.openapi import Task
from server.telemetry.observer import ObserverFactory
from server.text.answers import Answers
from server.text.chat_template import ChatTemplate
from server.text.content_parts import ChatImages, Json
from server.text.tokenizer import Tokenizer
from server.text.wanted_grammar import WantedGrammar

VERSION = importlib.metadata.version("penstock")
# The version of Ollama whose API is served. Clients refuse an older one, and read digits only.
OLLAMA_VERSION = "0.35.0"


@dataclass(frozen=True)
class AppState:
    config: ServerConfig
    engine_config: EngineConfig
    folder: Path  # of the checkpoint
    client: EngineClient
    tokenizer: Tokenizer
    template: ChatTemplate | None
    answers: Answers | None  # how the model writes its answers; None without a template
    hermes: Answers | None  # the same with tools in the system message
    truncate_dim: int | None  # the numbers of a vector that clients get; None: all
    text_limit: int | None  # tokens of a text for an encoder; None: its positions are the limit
    write_grammar: Callable[[WantedGrammar], Grammar]  # raises a 400 ApiError
    # Reads the images of messages, given with the name of their field. Raises ApiError.
    read_images: Callable[[Sequence[Json], str], Coroutine[None, None, ChatImages]]
    image_token: int | None  # the token in whose place images are; None: the model takes none
    # `system_fingerprint` of the model's answers, or of those of an adapter.
    fingerprint_of: Callable[[Ready, ServedAdapter | None], str]
    observers: list[ObserverFactory]  # of every generation
    names: tuple[str, ...]  # the names of the one model; the first is the canonical one
    adapters: AdapterRegistry  # of this model
    created: int  # Unix seconds
    body_turn: BodyTurn  # large bodies wait in it
    # Numbers of the open requests that a drain does not wait for.
    viewer_counts: list[Callable[[], int]] = field(default_factory=list)
    # Lines of the banner that wings add. Each takes the URL of the server.
    banner_lines: list[Callable[[str], str]] = field(default_factory=list)

    def model_name(self, asked: str | None) -> str:
        """Return the model name for the response. Raises a 404 ApiError for an unknown model."""
        if not asked:  # some clients send an empty name if none is configured
            return self.names[0]
        if asked not in self.names and self.adapters.find(asked) is None:
            served = ", ".join([*self.names, *(adapter.name for adapter in self.adapters)])
            message = f"The model {asked[:128]!r} does not exist; available: {served}."
            raise ApiError(404, "model_not_found", message, param="model")
        return asked

    def loaded(self) -> Ready:
        """Return the properties of the loaded model.

        Raises EngineUnavailableError before the model is loaded and after the engine's death,
        because some readiness probes use /v1/models.
        """
        info, state = self.client.info, self.client.state
        if info is None or state == "dead":
            raise EngineUnavailableError(state, f"The engine is {state}.")
        return info

    @property
    def task(self) -> Task:
        """The first task of the loaded model; raises as `loaded` does."""
        info = self.loaded()
        if info.kind != "encoder":
            return "generate"
        if not info.num_labels:
            return "embed"
        return "score" if info.num_labels == 1 else "classify"

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks of the loaded model: vectors give scores too, and scores are labels."""
        second: dict[Task, tuple[Task, ...]] = {"embed": ("score",), "score": ("classify",)}
        return (self.task, *second.get(self.task, ()))

    def check_task(self, task: Task) -> None:
        """Raise a 400 ApiError if the model cannot do `task`."""
        if task in self.tasks:
            return
        info = self.loaded()
        does = {
            "generate": "generates text; use /v1/chat/completions or /v1/completions",
            "embed": "makes embeddings; use /v1/embeddings or /v1/score",
            "score": "scores pairs of texts; use /v1/rerank, /v1/score or /v1/classify",
            "classify": f"has {info.num_labels} labels for a text; use /v1/classify",
        }
        message = f"The model {self.names[0]!r} ({info.architecture}) {does[self.task]}."
        raise invalid("model", message, "unsupported_model")

    @property
    def start_token(self) -> int | None:
        """First token of an encoder–decoder's output; None for models that continue prompts."""
        return self.loaded().start_token

    def vector_size(self) -> int:
        """Return the length of the vectors that clients get; 0 if the model makes none."""
        computed = self.loaded().embedding_size
        return computed if self.truncate_dim is None else min(computed, self.truncate_dim)

    def max_length(self) -> int:
        """Return the token limit of one sequence or text. The KV cache always has room for it."""
        info = self.loaded()
        longest = info.max_model_len
        if info.kind == "encoder" and self.text_limit is not None:
            longest = min(longest, self.text_limit)
        return longest

    def api_error(self, error: BaseException) -> ApiError:
        """Return the error response for any exception."""
        return to_api_error(error, draining=self.client.state == "draining")


def state_of(request: Request) -> AppState:
    state = request.app.state.penstock
    assert isinstance(state, AppState)
    return state
