"""Service: what every route works with, made once by `create_app`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal

from starlette.requests import Request

from engine.client import EngineClient
from engine.errors import EngineUnavailableError
from engine.protocol import Ready
from server.chat_template import ChatTemplate
from server.config import ServerConfig
from server.errors import ApiError, invalid, to_api_error
from server.keys import ApiKeys
from server.metrics import Metrics
from server.pooling import PoolingConfig
from server.schemas.body import BodyType, LargeBodies, read_body
from server.tokenizer import Tokenizer
from server.tracing import Tracing

Task = Literal["generate", "embed"]


@dataclass(frozen=True)
class Service:
    config: ServerConfig
    client: EngineClient
    keys: ApiKeys
    tokenizer: Tokenizer
    template: ChatTemplate | None
    pooling: PoolingConfig  # of an encoder
    metrics: Metrics
    tracing: Tracing | None
    names: tuple[str, ...]  # the names of the one model; the first is the canonical one
    created: int  # Unix seconds
    # For long work that nothing admits: threads are left for the prompts of those admitted.
    spare_threads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))
    large_bodies: LargeBodies = field(default_factory=LargeBodies)

    def model_name(self, asked: str | None) -> str:
        """The name to answer with; raises a 404 where the model is not the one served."""
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            served = ", ".join(self.names)
            message = f"The model {asked[:128]!r} does not exist; served here: {served}."
            raise ApiError(404, "model_not_found", message, param="model")
        return asked

    def loaded(self) -> Ready:
        """Facts of the model; raises EngineUnavailableError before it is loaded and after the
        engine's death: readiness probes ask /v1/models."""
        info, state = self.client.info, self.client.state
        if info is None or state == "dead":
            raise EngineUnavailableError(state, f"The engine is {state}.")
        return info

    def check_task(self, task: Task) -> None:
        """Raises a 400 where the model does the other."""
        info = self.loaded()
        if (info.kind == "encoder") == (task == "embed"):
            return
        does = {
            "embed": "generates text; ask /v1/chat/completions or /v1/completions",
            "generate": "makes embeddings; ask /v1/embeddings or /v1/score",
        }
        message = f"The model {self.names[0]!r} ({info.architecture}) {does[task]}."
        raise invalid("model", message, "unsupported_model")

    @property
    def start_token(self) -> int | None:
        """With which an encoder–decoder's answer begins; None for models that continue prompts."""
        return self.loaded().start_token

    def longest(self) -> int:
        """Most tokens one sequence or text may have; the KV cache always holds so many."""
        info = self.loaded()
        own = info.max_model_len
        return self.pooling.limit(own) if info.kind == "encoder" else own

    def api_error(self, error: Exception) -> ApiError:
        """What the client is told about any exception at all."""
        return to_api_error(error, draining=self.client.state == "draining")


async def accept(request: Request, kind: type[BodyType], task: Task) -> tuple[Service, BodyType]:
    """A body for the model served here; a full queue refuses it unread."""
    service = service_of(request)
    service.client.admit()
    service.check_task(task)
    body = await read_body(request, kind, service.large_bodies)
    service.model_name(body.model)
    return service, body


def service_of(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service
