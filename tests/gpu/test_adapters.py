"""LoRA adapters on a GPU: the tokens are those of the merged models on a CPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.test_adapters import MIXED, RANKS, Adapted

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(tmp_path_factory.mktemp("adapted"), RANKS)


@pytest.mark.parametrize(
    "config",
    [{"enforce_eager": True}, {"depth": 1}, {"depth": 1, "max_loras": 2}],
    ids=["eager", "graphs", "slots are reused"],
)
def test_adapters_in_each_mode_give_tokens_of_merged_models(
    adapted: Adapted, cuda: str, config: dict[str, Any]
) -> None:
    driver = adapted.driver(device=cuda, kv_cache_memory_bytes=64 << 20, **config)
    for _ in range(2):
        adapted.check(driver, MIXED)
