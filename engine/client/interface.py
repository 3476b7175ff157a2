"""EngineClient: the async interface to the engine in the API process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from engine.client.output_stream import OutputStream
from engine.errors import EngineDeadError
from engine.protocol.embed import EmbedOutput, EmbedRequest
from engine.protocol.generate import GenerateRequest, Image
from engine.protocol.outputs import EngineStats, StepOutputs, TokenOutput
from engine.protocol.ready import Progress, Ready

State = Literal["loading", "ready", "draining", "dead"]


class EngineClient(Protocol):
    """The interface that requests need; tests implement it without a process.

    That of the built-in pages is InspectedEngine.
    """

    state: State
    info: Ready | None  # None until the model is loaded
    progress: Progress
    step_listeners: list[Callable[[StepOutputs], None]]  # called for every step, in this order
    config_error: bool  # the engine died because its configuration cannot be served

    @property
    def stats(self) -> EngineStats:
        """Stats of the last step; `waiting` also counts requests not yet admitted."""

    async def start(self) -> None:
        """Start the engine and return at once; it loads in the background."""

    async def wait_ready(self) -> Ready:
        """Wait until the model is loaded. Raises EngineDeadError if loading failed."""

    async def wait_dead(self) -> EngineDeadError:
        """Wait until the engine dies without `stop`; return the reason."""

    def admit(self, tenant: str = "") -> None:
        """Check for room for one more request of a tenant. Cheap enough to call before tokenising
        it. Raises EngineUnavailableError or EngineOverloadedError."""

    def reserve(self, tenant: str = "") -> contextlib.AbstractContextManager[None]:
        """Reserve a queue place for a request that passed `admit`. Submit it right after the
        context. Raises EngineOverloadedError if other requests took the room."""

    def submit(self, requests: Sequence[GenerateRequest]) -> OutputStream[TokenOutput]:
        """Submit all of the requests or none. They passed `admit`, possibly before a drain. Raises
        EngineDeadError, EngineOverloadedError (prompt tokens count too) or RequestRejectedError."""

    def embed(self, requests: Sequence[EmbedRequest]) -> OutputStream[EmbedOutput]:
        """Submit texts to embed, as `submit` does. In the queue they count as one request."""

    async def num_cached(
        self,
        prompt: Sequence[int],
        salt: str,
        encoder_prompt: Sequence[int] = (),
        adapter: int = 0,
        images: Sequence[Image] = (),
    ) -> int:
        """Return how many tokens of a prompt and its source are in the prefix cache. The answer
        comes between two steps. Raises EngineUnavailableError or EngineDeadError."""

    async def load_adapter(self, adapter: int, path: str) -> str:
        """Load the adapter in a folder, whose number no other one has had. Return why the engine
        refuses it, or "". Raises EngineUnavailableError or EngineDeadError."""

    def unload_adapter(self, adapter: int) -> None:
        """Refuse further requests for an adapter, and free its memory when the last has ended."""

    def next_id(self) -> int: ...

    def last_step_age(self) -> float:
        """Seconds since the engine last sent a message while it had work; 0 if it has none."""

    @property
    def busy(self) -> bool:
        """Whether any accepted request is unfinished."""

    def drain(self) -> None:
        """Make `admit` refuse requests; those that passed it can still be submitted and go on."""

    async def stop(self) -> None:
        """End the engine process. Idempotent."""
