"""Requests with LoRA adapters, many in one batch, get the tokens of the merged models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.adapters import folded, random_adapter
from tests.support.driver import MODES, Driver, tiny_llama

RANKS = (8, 64, 16, 3, 32, 8, 24, 48)
PROMPTS = [[(7 * n + 3 * i) % 500 + 1 for i in range(9 + 5 * n)] for n in range(12)]
COUNT = 8


class Adapted:
    """A base model, adapters for it, and the tokens of each merged model by prompt."""

    def __init__(self, folder: Path, ranks: tuple[int, ...]) -> None:
        self.base = tiny_llama(folder / "base")
        self.folders = [
            random_adapter(folder / f"adapter-{n}", self.base, rank=rank, seed=n)
            for n, rank in enumerate(ranks, 1)
        ]
        merged = [folded(self.base, a, folder / f"merged-{a.name}") for a in self.folders]
        self.due = [self._tokens(model) for model in (self.base, *merged)]
        answers = {tuple(answer) for model in self.due for answer in model}
        assert len(answers) == len(self.due) * len(PROMPTS), "adapters must change every answer"

    def _tokens(self, model: Path) -> list[list[int]]:
        driver = Driver(model)
        ids = [driver.submit(prompt, COUNT) for prompt in PROMPTS]
        driver.run()
        return [driver.tokens(request_id) for request_id in ids]

    def driver(self, **config: Any) -> Driver:
        modules = [f"a{n}={folder}" for n, folder in enumerate(self.folders, 1)]
        return Driver(self.base, lora_modules=tuple(modules), **config)

    def check(self, driver: Driver, pairs: list[tuple[int, int]]) -> None:
        """Submit (adapter, prompt) pairs at once, and compare the answers."""
        due = {
            driver.submit(PROMPTS[prompt], COUNT, adapter=adapter): self.due[adapter][prompt]
            for adapter, prompt in pairs
        }
        driver.run()
        assert {request_id: driver.tokens(request_id) for request_id in due} == due


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(tmp_path_factory.mktemp("adapted"), RANKS)


MIXED = [(n % (len(RANKS) + 1), n % len(PROMPTS)) for n in range(22)]


@pytest.mark.variants(2)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_adapters_mixed_in_a_batch_give_tokens_of_merged_models(
    adapted: Adapted, mode: dict[str, Any]
) -> None:
    driver = adapted.driver(**mode)
    adapted.check(driver, MIXED)
    if driver.tapes:
        driver.check_static()


def test_adapters_in_captured_steps_use_graphs_of_their_own(adapted: Adapted) -> None:
    driver = adapted.driver(**MODES["captured"])
    assert driver.tapes
    adapted.check(driver, [(0, 1)])
    plain = driver.tapes.replays
    adapted.check(driver, [(3, 1)])
    assert driver.tapes.replays > plain, "steps with adapters were not replayed"


@pytest.mark.parametrize(
    "config",
    [
        {"max_num_batched_tokens": 16},
        {"num_gpu_blocks_override": 12, "block_size": 16},
        {"prepack": False},
        {"attention_backend": "torch", "enable_prefix_caching": False},
    ],
    ids=str,
)
def test_adapters_in_chunks_and_after_preemption_give_tokens_of_merged_models(
    adapted: Adapted, config: dict[str, Any]
) -> None:
    driver = adapted.driver(**config)
    adapted.check(driver, MIXED)
    assert driver.stats.preemptions > 0 or "num_gpu_blocks_override" not in config


@pytest.mark.parametrize("block_size", [16, 64])  # the larger holds parts that are copied
def test_adapter_never_reuses_prefixes_of_another(adapted: Adapted, block_size: int) -> None:
    driver = adapted.driver(block_size=block_size)
    first, other, again, base = (1, 11), (2, 11), (1, 11), (0, 11)
    for place, (pair, cached) in enumerate([(first, 0), (other, 0), (base, 0), (again, 48)], 1):
        adapted.check(driver, [pair])
        assert (driver.cached_tokens(place) > 0) == (cached > 0)


@pytest.mark.parametrize("config", [{"attention_backend": "torch"}, {"dtype": "bfloat16"}], ids=str)
def test_adapter_token_bits_do_not_depend_on_the_batch(
    adapted: Adapted, config: dict[str, Any]
) -> None:
    def logprobs(*pairs: tuple[int, int]) -> list[float]:
        driver = adapted.driver(enable_prefix_caching=False, **config)
        ids = [driver.submit(PROMPTS[p], COUNT, adapter=a, logprobs=0) for a, p in pairs]
        driver.run()
        return driver.logprobs(ids[0])

    alone = logprobs((2, 5))
    assert logprobs((2, 5), (2, 6), (1, 5), (0, 3), (2, 7)) == alone
    assert logprobs((2, 5), (0, 5)) == alone


def test_adapters_with_drafts_give_tokens_of_merged_models(adapted: Adapted) -> None:
    driver = adapted.driver()
    for _ in range(2):  # the second time all tokens are drafted
        adapted.check(driver, [(5, 4), (0, 4)])
    assert driver.stats.drafted_right > 0


def test_adapters_over_a_quantized_base_correct_its_outputs(adapted: Adapted) -> None:
    driver = adapted.driver(quantization="int8")
    ids = [driver.submit(PROMPTS[3], COUNT, adapter=adapter) for adapter in (0, 1, 2)]
    driver.run()
    got = [driver.tokens(request_id)[:2] for request_id in ids]
    assert got == [adapted.due[adapter][3][:2] for adapter in (0, 1, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("max_loras", [64, 8])
def test_64_adapters_of_32_requests_at_a_time_give_tokens_of_merged_models(
    tmp_path: Path, max_loras: int
) -> None:
    ranks = tuple(8 * (1 + n % 8) for n in range(64))
    adapted = Adapted(tmp_path, ranks)
    driver = adapted.driver(max_loras=max_loras, max_num_seqs=32)
    adapted.check(driver, [((5 * n) % 65, n % len(PROMPTS)) for n in range(130)])
