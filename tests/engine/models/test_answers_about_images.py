"""Forty greedy tokens about images equal transformers' in fp32, in all ways to serve a prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from tests.engine.models import (
    test_gemma3,
    test_idefics3,
    test_llava,
    test_qwen2_5_vl,
    test_qwen3_vl,
)
from tests.support import qwen_images
from tests.support.golden import Case
from tests.support.seeing import Family, SeeingGolden
from tests.support.vision import picture

pytestmark = pytest.mark.usefixtures("one_thread")
BUDGET = 8  # tokens of a step, fewer than any `one` has


def with_other_pixels(each: Any, seed: int) -> Any:
    return replace(each, pixels=picture(each.pixels.shape, seed))


def qwen(name: str, config: Callable[[], Any], types: str = "mm_token_type_ids") -> Family:
    """Return a family of Qwen's, whose pictures have any number of rows and columns."""
    shown = qwen_images.shown
    return Family(
        Case(name, config),
        test_qwen3_vl.IMAGE_TOKEN,
        one=shown(3, 5, 0),
        other=shown(3, 5, 4),
        three=[shown(4, 2, 1), shown(2, 10, 5), shown(1, 1, 2)],
        inputs=qwen_images.vision_inputs,
        types=types,
    )


def gemma3(name: str, **overrides: Any) -> Family:
    square = test_gemma3.square
    return Family(
        Case(name, lambda: test_gemma3.seeing(**overrides, tie_word_embeddings=False)),
        test_gemma3.IMAGE_TOKEN,
        one=square(0),
        other=square(1),
        three=[square(2), square(3), square(4)],
        inputs=test_gemma3.pixel_values,
        types="token_type_ids",
        kv_groups=4,
    )


def smolvlm() -> Family:
    shown = test_idefics3.shown
    return Family(
        Case("smolvlm", lambda: test_idefics3.config("SmolVLM")),
        test_idefics3.IMAGE_TOKEN,
        one=shown(5, 1),
        other=shown(5, 4),
        three=[shown(4, 0), shown(1, 2), shown(2, 3)],
        inputs=test_idefics3.inputs,
    )


def llava_next(name: str, text: str) -> Family:
    return Family(
        Case(name, lambda: test_llava.config("LlavaNext", text)),
        test_llava.IMAGE_TOKEN,
        one=test_llava.WHOLE,
        other=with_other_pixels(test_llava.WHOLE, 9),
        three=[test_llava.LOW, with_other_pixels(test_llava.LOW, 8), test_llava.SMALL],
        inputs=test_llava.padded_inputs,
    )


def onevision() -> Family:
    return Family(
        Case("onevision", test_llava.config),
        test_llava.IMAGE_TOKEN,
        one=test_llava.LOW,
        other=with_other_pixels(test_llava.LOW, 9),
        three=[test_llava.one_tile(seed) for seed in (1, 2, 3)],
        inputs=test_llava.onevision_inputs,
    )


QUICK = [
    smolvlm(),
    llava_next("llava-next", "mistral"),
    onevision(),
    gemma3("gemma3", sliding_window=5),  # an image is longer than the window
    qwen("qwen2.5-vl", test_qwen2_5_vl.config),
    qwen("qwen3-vl", test_qwen3_vl.config),
]
FAMILIES = [
    *QUICK,
    llava_next("llava-next-llama", "llama"),
    gemma3("gemma3-long-window", sliding_window=14),
]
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "chunked": {"max_num_batched_tokens": BUDGET},
    "late": {"depth": 1, "late": True, "max_num_batched_tokens": 24},
    "captured": {"depth": 1, "late": True, "captured": True, "max_num_batched_tokens": 24},
    "small blocks": {"block_size": 4, "attention_backend": "torch", "kernels": "torch"},
    "one sequence": {"max_num_seqs": 1, "max_num_batched_tokens": 3},
    "drafted": {"speculation": "ngram"},
}


@pytest.fixture(scope="module")
def families(
    tmp_path_factory: pytest.TempPathFactory, one_thread: None
) -> Callable[[Family], SeeingGolden]:
    pytest.importorskip("transformers")
    return cache(lambda family: SeeingGolden(family, tmp_path_factory.mktemp(family.case.name)))


@pytest.fixture
def seeing(
    request: pytest.FixtureRequest, families: Callable[[Family], SeeingGolden]
) -> SeeingGolden:
    return families(request.param)


def of(families: list[Family]) -> pytest.MarkDecorator:
    names = [family.case.name for family in families]
    return pytest.mark.parametrize("seeing", families, indirect=True, ids=names)


@of(QUICK)
@pytest.mark.variants(2)
def test_answers_about_images_in_chunks_behind_hits_and_preemptions_equal_transformers(
    seeing: SeeingGolden,
) -> None:
    assert seeing.family.one.num_tokens > BUDGET, "no step has the whole image"
    driver = seeing.driver(max_num_batched_tokens=BUDGET, depth=1, late=True)
    assert seeing.is_inside(seeing.check_hits(driver))
    seeing.check_all(driver, turns=2, preemptions=5)
    assert driver.stats.preemptions >= 5


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@of(FAMILIES)
def test_answers_about_images_in_each_mode_equal_transformers(
    seeing: SeeingGolden, mode: str
) -> None:
    """The first round fills the cache, the second one hits it, and both are preempted."""
    driver = seeing.driver(**MODES[mode])
    seeing.check_hits(driver)
    for turns in (0, 3):
        seeing.check_all(driver, turns, preemptions=9)
    assert driver.stats.preemptions >= 9
    if "captured" in MODES[mode]:
        driver.check_static()


@pytest.mark.slow
@of(FAMILIES)
def test_answers_about_images_without_cache_and_batch_equal_transformers(
    seeing: SeeingGolden,
) -> None:
    driver = seeing.driver(enable_prefix_caching=False)
    for story in seeing.family.stories:
        request = seeing.ask(driver, story)
        seeing.check(driver, {story: request})
        assert not driver.cached_tokens(request)
