"""Each ablation of the GPU benchmarks removes its kernels from the decode step, and no others."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="kernels need triton, which is not installed")

from loadtest.gpu.ablations import FUSIONS
from tests.engine.runner.test_fake_cuda import engine, generate
from tests.support.fake_cuda import fake_cuda

REMOVED = {
    "norms in torch": {"_norm_kernel"},
    "head norms and rotation in torch": {"_rotate_kernel"},
    "gates in torch": {"_activation_kernel"},
    "embedding in torch": {"_gather_kernel"},
    "few rows times weights in torch": {"_linear_kernel"},
    "sampling in torch": {"_chunk_kernel", "_pick_kernel"},
    "launches not overlapped": set(),
}


def kernels_launched(folder: Path, ablation: AbstractContextManager[None]) -> set[str]:
    with fake_cuda() as launches, ablation:
        generate(engine("qwen3-0.6b", folder))
    return set(launches)


def test_every_fusion_has_its_kernels_listed() -> None:
    assert FUSIONS.keys() == REMOVED.keys()


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The kernels of a decode step without an ablation."""
    return kernels_launched(tmp_path_factory.mktemp("everything"), nullcontext())


@pytest.mark.slow
@pytest.mark.parametrize("name", FUSIONS)
def test_ablation_removes_only_its_own_kernels(
    name: str, tmp_path: Path, everything: set[str]
) -> None:
    assert everything - kernels_launched(tmp_path, FUSIONS[name]()) == REMOVED[name]
