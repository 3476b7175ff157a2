"""An engine in the server's own process: texts become vectors as in production."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from engine.protocol.outputs import Admission, EngineStats, StepOutputs
from tests.support.driver import Driver
from tests.support.fake_encoder import FakeEncoder


class RealEncoder(FakeEncoder):
    """Encodes the texts that wait with the model in `folder`, in fp32."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.driver = Driver(folder, **config)
        super().__init__(lambda request: [], info=self.driver.core.facts)

    def _step(self) -> None:
        self.driver.inbox += [request for request, _ in self.waiting.values()]
        self.driver.run()
        at, outputs = time.monotonic(), []
        for request_id, (_, stream) in self.waiting.items():
            outputs.append(self.driver.embeddings[request_id])
            stream.admissions[request_id] = Admission(request_id, at, 0)
            stream.deliver(at, outputs[-1])
        self.waiting.clear()
        self.stats = EngineStats(step=self.stats.step + 1)
        for listen in self.step_listeners:
            listen(StepOutputs(at, [], [], self.stats, outputs))
