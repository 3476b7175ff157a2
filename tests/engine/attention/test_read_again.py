"""A layer that reads the KV of an earlier layer attends like that layer, and stores nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.attention.backend import AttentionBackend, StepLayout
from engine.attention.kv_cache import LayerKV
from engine.attention.numba import NumbaBackend
from engine.attention.spec import AttentionSpec
from engine.attention.torch.backend import TorchBackend
from tests.support.paged import PagedRun, random_sequences

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.3, window=20)


def triton_backend() -> AttentionBackend:
    pytest.importorskip("triton", reason="kernels need triton, which is not installed")
    from engine.attention.triton import TritonBackend

    return TritonBackend(CPU)


class ReadsAgain:
    """Attends twice, the second time to what is stored, and checks that nothing differs."""

    def __init__(self, backend: AttentionBackend) -> None:
        self.backend = backend
        self.steps = 0

    def plan(self, layout: StepLayout) -> Any:
        inner, count = self.backend.plan(layout), self._count

        class Plan:
            def attend(
                self,
                spec: AttentionSpec,
                kv: LayerKV,
                query: torch.Tensor,
                key: torch.Tensor,
                value: torch.Tensor,
                sinks: torch.Tensor | None = None,
            ) -> torch.Tensor:
                found = inner.attend(spec, kv, query, key, value, sinks=sinks)
                keys, values = kv.keys.clone(), kv.values.clone()
                again = inner.attend(spec, kv, query, None, None, sinks=sinks)
                assert torch.equal(again, found)
                assert torch.equal(kv.keys.nan_to_num(9), keys.nan_to_num(9))
                assert torch.equal(kv.values.nan_to_num(9), values.nan_to_num(9))
                other = inner.attend(spec, kv, query.flip(0), None, None, sinks=sinks)
                assert not torch.equal(other, found)
                count()
                return found

        return Plan()

    def _count(self) -> None:
        self.steps += 1


@pytest.mark.parametrize(
    "make",
    [TorchBackend, lambda: NumbaBackend(CPU), triton_backend],
    ids=["torch", "numba", "triton"],
)
def test_attend_without_keys_reads_what_an_earlier_layer_stored(make: Any) -> None:
    """In decodes, one that fills its block among them, in chunks, and in whole prompts."""
    backend: Any = ReadsAgain(make())
    run = PagedRun(random_sequences(SPEC, [17, 40, 32, 9]), 16, backend=backend)
    for block in run.cache.layers:
        for numbers in (block.keys, block.values):
            numbers.nan_to_num_(0)
    run.step([(0, 0, 16), (1, 0, 38), (2, 0, 31)])
    run.step([(0, 16, 1), (1, 38, 2), (2, 31, 1), (3, 0, 9)])
    assert backend.steps == 2
