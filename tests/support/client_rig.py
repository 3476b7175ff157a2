"""A ProcessClient without an engine process: the test acts as the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.client.client import ProcessClient
from engine.client.output_stream import OutputStream
from engine.config import EngineConfig
from engine.protocol.generate import Abort, GenerateRequest, SamplingParams
from engine.protocol.outputs import Admission, EngineStats, StepOutputs, TokenOutput
from engine.protocol.ready import Ready
from engine.protocol.wire import ToEngine

READY = Ready(
    "Llama", "decoder", "float32", "cpu", 512, 256, 64, 9, 8, 64, 1, 1, 1, 0.1, "torch", 1, ()
)


class FakeEndpoint:
    """Records the messages sent to the engine. `late` holds deliveries made after its end."""

    def __init__(self) -> None:
        self.sent: list[ToEngine] = []
        self.late: list[Callable[[], None]] = []
        self.closed = False

    def send(self, message: ToEngine) -> None:
        assert not self.closed
        self.sent.append(message)

    def receive(self, wait_s: float) -> bool:
        if not self.late:
            return False
        self.late.pop(0)()
        return True

    def close(self) -> None:
        self.closed = True

    @property
    def aborted(self) -> list[list[int]]:
        return [message.ids for message in self.sent if isinstance(message, Abort)]


class FakeChild:
    """Stands in for the engine process and records what the client does to it."""

    def __init__(self) -> None:
        self.endpoint = FakeEndpoint()
        self.process = self
        self.killed = False

    def kill(self) -> None:
        self.killed = True

    def close(self) -> None:
        self.endpoint.close()


class Client(ProcessClient):
    """A client whose engine is played by the test."""

    def __init__(self, **config: Any) -> None:
        super().__init__(EngineConfig(**config))
        self.child: Any = FakeChild()
        self._child = self.child
        self._endpoint = self.endpoint = self.child.endpoint
        self._on_message(READY)

    def request(self, length: int = 3) -> GenerateRequest:
        return GenerateRequest(self.next_id(), [1] * length, SamplingParams(8), 0.0)

    def submit_prompts(self, *lengths: int) -> tuple[OutputStream, list[int]]:
        requests = [self.request(length) for length in lengths]
        return self.submit(requests), [request.id for request in requests]

    def offer(self, length: int) -> None:
        """Raise as `submit` of a prompt of `length` tokens would, without sending it."""
        self._queue.check(1, length, self.stats)

    def step(
        self,
        *tokens: TokenOutput,
        admitted: tuple[int, ...] = (),
        at: float = 1.0,
        stats: EngineStats | None = None,
    ) -> None:
        admissions = [Admission(i, at, 0) for i in admitted]
        count = len(self.endpoint.sent)
        outputs = StepOutputs(
            at, list(tokens), admissions, stats or EngineStats(), num_handled=count
        )
        self._on_message(outputs)

    def die(self, code: int) -> None:
        self._on_exit(code)


def token(request_id: int, value: int, finish: Any = None) -> TokenOutput:
    return TokenOutput(request_id, value, finish)


async def read(stream: OutputStream) -> list[list[int]]:
    """Return the tokens of each batch until the stream ends."""
    return [[output.token for _, output in batch] async for batch in stream]
