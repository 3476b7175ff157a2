"""A scripted encoder: each text becomes four numbers that depend on its tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from engine.client.output_stream import OutputStream
from engine.protocol.embed import EmbedOutput, EmbedRequest
from engine.protocol.outputs import Admission, EngineStats, StepOutputs
from engine.protocol.ready import Ready
from tests.support.fake_engine import INFO, FakeEngine, as_received

SIZE = 4
ENCODER = msgspec.structs.replace(
    INFO, kind="encoder", num_blocks=0, kv_groups=(), kv_cache_bytes=0, embedding_size=SIZE
)
BROKEN = 66  # a text with this token, the letter "c", gets a vector that is not finite


def vector(tokens: Sequence[int]) -> np.ndarray:
    return np.array([len(tokens), sum(tokens) % 97, tokens[0], -tokens[-1]], dtype="<f4")


@dataclass
class FakeEncoder(FakeEngine):
    """Encodes one text per step, the newest first. `gate` works as in FakeEngine.

    With a head of `labels` their logits are the first numbers of the vectors.
    """

    info: Ready | None = ENCODER
    labels: int = 0
    texts: list[EmbedRequest] = field(default_factory=list)  # all submitted texts
    waiting: dict[int, tuple[EmbedRequest, OutputStream[EmbedOutput]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.labels and self.info is not None:
            self.info = msgspec.structs.replace(self.info, embedding_size=0, num_labels=self.labels)

    def embed(self, requests: Sequence[EmbedRequest]) -> OutputStream[EmbedOutput]:
        self.admit()
        stream: OutputStream[EmbedOutput] = OutputStream([r.id for r in requests], self._abort)
        received = list(map(as_received, requests))
        self.texts += received
        self.waiting |= {request.id: (request, stream) for request in received}
        self._work.set()
        return stream

    def _abort(self, ids: list[int]) -> None:
        super()._abort(ids)
        for request_id in ids:
            self.waiting.pop(request_id, None)

    def die(self, message: str = "secret reason at /home/x 0xdead") -> None:
        super().die(message)
        for _, stream in self.waiting.values():
            stream.fail(self.death)
        self.waiting.clear()

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def _step(self) -> None:
        at, outputs = time.monotonic(), []
        if self.waiting:
            request_id, (request, stream) = self.waiting.popitem()
            finish = "error" if BROKEN in request.tokens else "stop"
            numbers = vector(request.tokens)[: self.labels or None]
            outputs.append(EmbedOutput(request_id, numbers.tobytes(), finish))
            stream.admissions[request_id] = Admission(request_id, at, 0)
            stream.deliver(at, outputs[0])
        self.stats = EngineStats(step=self.stats.step + 1, running=len(self.waiting))
        for listen in self.step_listeners:
            listen(StepOutputs(at, [], [], self.stats, outputs))

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            await self.gate.wait()
            self._step()
            if not self.waiting:
                self._work.clear()
            await asyncio.sleep(self.delay)
