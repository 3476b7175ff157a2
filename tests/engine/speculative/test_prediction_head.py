"""Drafts of a prediction head: those of the reference, and the answers stay the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from engine.scheduling import drafts
from engine.scheduling.sequence import Sequence as Record
from engine.speculative.prediction_head import HeadDrafter
from tests.engine.test_seeds import SETTINGS, request
from tests.support.drafts import run_with_aborts
from tests.support.driver import Driver
from tests.support.golden import TOLERANCE, Edit, edit_checkpoint, of_transformers
from tests.support.prediction_heads import ReferenceHead, add_head, add_right_head
from tests.support.single_steps import in_single_steps

pytestmark = pytest.mark.usefixtures("one_thread")
COUNT = 16
REQUESTS = range(len(SETTINGS))
VOCAB = 600  # that of `request`
# Prompts of up to 50 tokens take several steps, and drafts end in the next block.
SMALL = {"block_size": 16, "max_num_seqs": 8, "state_memory_bytes": 2**22}
FAMILIES = [
    "qwen3_5",
    pytest.param("qwen3_next", marks=pytest.mark.slow),
    pytest.param("qwen3_5_moe", marks=pytest.mark.slow),
]
HEADS: dict[str, Edit] = {"wrong": add_head, "right": add_right_head}


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[float]


class Draft(NamedTuple):
    known: list[int]
    drafted: list[int]
    logits: torch.Tensor  # [drafted, vocabulary]


def written(folder: Path, family: str, edit: Edit) -> Any:
    """Write a checkpoint with a head; return the model of transformers without it."""
    pytest.importorskip("transformers")
    config = import_module(f"tests.engine.models.test_{family}").config(vocab_size=VOCAB)
    model = in_single_steps(of_transformers(config, folder))
    edit_checkpoint(folder, edit)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Return a function from a family and a head's name to the folder of a checkpoint."""

    @cache
    def folder_of(family: str, head: str) -> Path:
        folder = tmp_path_factory.mktemp(f"{family}-{head}")
        written(folder, family, HEADS[head])
        return folder

    return folder_of


@pytest.fixture(scope="module")
def answers(folders: Callable[[str, str], Path]) -> Callable[[str, str], list[Answer]]:
    """Return a function to the answers of all requests without drafts, of a checkpoint."""

    @cache
    def answers_of(family: str, head: str) -> list[Answer]:
        driver = Driver(folders(family, head), speculation="off", **SMALL)
        ids = [submit(driver, number) for number in REQUESTS]
        driver.run()
        return [Answer(driver.tokens(i), driver.logprobs(i)) for i in ids]

    return answers_of


def drafted_driver(folder: Path, **config: Any) -> Driver:
    return Driver(folder, speculation="mtp", **(SMALL | config))


def drafter_of(driver: Driver) -> HeadDrafter:
    drafter = driver.core.scheduler.speculation._drafter
    assert isinstance(drafter, HeadDrafter)
    return drafter


def note_drafts(driver: Driver) -> list[Draft]:
    """Return a list that every draft is added to. They have 3 tokens, however few are checked."""
    found: list[Draft] = []
    drafter, model = drafter_of(driver), driver.runner.model

    def draft(sequence: Record, most: int) -> Sequence[int]:
        computed: list[torch.Tensor] = []
        with pytest.MonkeyPatch.context() as patch:
            logits = model.logits
            patch.setattr(
                model, "logits", lambda hidden: computed.append(logits(hidden)) or computed[-1]
            )
            drafted = list(drafter(sequence, 3))
        if drafted:
            found.append(Draft(list(sequence.tokens), drafted, torch.cat(computed)))
        return drafted[:most]

    driver.core.scheduler.speculation._drafter = draft
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_those_of_the_reference(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind chunks, wrong drafts, full blocks, and prefix hits.

    The row of the last hit had another request before, which ended where the hit ends.
    """
    monkeypatch.setattr(drafts, "LONGEST_PAUSE", 2)
    reference = ReferenceHead(written(tmp_path, family, add_head), tmp_path)
    driver = drafted_driver(tmp_path, max_num_batched_tokens=24)
    found = note_drafts(driver)
    prompt = [(7 * index * index + 3) % VOCAB for index in range(45)]
    first = driver.submit(prompt, 22, temperature=1.0, seed=3)
    driver.run()
    again = [*prompt, *driver.tokens(first), 5, 6, 7]
    for text, count in ((again, 8), ([9] * 64, 1), ([*again[:65], 8], 3)):
        driver.submit(text, count)
        driver.run()
    assert driver.stats.prefix_hits == 64 + 64
    assert driver.stats.drafted_right < driver.stats.drafted
    assert {len(draft.known) // 16 for draft in found} == {2, 3, 4}, "drafts in several blocks"
    for known, drafted, logits in found:
        expected = reference.logits(known, drafted[:-1])
        torch.testing.assert_close(logits, expected, **TOLERANCE)


@pytest.mark.parametrize("head", ["right", pytest.param("wrong", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_and_logprobs_do_not_depend_on_the_head(
    folders: Callable[[str, str], Path],
    answers: Callable[[str, str], list[Answer]],
    family: str,
    head: str,
) -> None:
    """Streams alone, then four at a time with prefix hits: bit for bit."""
    driver = drafted_driver(folders(family, head), max_num_batched_tokens=24)
    due = answers(family, head)
    for together in (1, 4):
        for first in range(0, len(REQUESTS), together):
            started = {submit(driver, n): n for n in REQUESTS[first : first + together]}
            driver.run()
            for request_id, number in started.items():
                found = Answer(driver.tokens(request_id), driver.logprobs(request_id))
                assert found == due[number]
    right = driver.stats.drafted_right / driver.stats.drafted
    assert right < 0.3 if head == "wrong" else 0.5 < right < 1  # a head knows no penalties
    assert driver.stats.prefix_hits


def submit(driver: Driver, number: int, **more: Any) -> int:
    prompt, params = request(number)
    return driver.submit(prompt, COUNT, logprobs=1, **params, **more)


def test_right_head_saves_steps(folders: Callable[[str, str], Path]) -> None:
    driver = drafted_driver(folders("qwen3_5", "right"))
    driver.submit([1, 2, 3], 24)
    driver.run()
    # The prompt's step yields one token, then drafts of 2, 4 and 7 tokens 3, 5, 8 and the last 7.
    assert driver.stats.step == 1 + 4
    assert driver.stats.drafted_right == driver.stats.drafted == 2 + 4 + 7 + 6


def test_drafts_do_not_outlive_preemption_and_aborts(
    folders: Callable[[str, str], Path], answers: Callable[[str, str], list[Answer]]
) -> None:
    due = answers("qwen3_5", "right")
    driver = drafted_driver(folders("qwen3_5", "right"), num_gpu_blocks_override=6)
    ids: dict[int, int] = {}
    whole = run_with_aborts(driver, submit, REQUESTS, ids)
    assert driver.stats.drafted_right > 20
    assert len(whole) >= 7
    for request_id in whole:
        assert driver.tokens(request_id) == due[ids[request_id]].tokens


def test_head_is_not_computed_while_too_many_streams_decode(
    folders: Callable[[str, str], Path],
) -> None:
    """Only full blocks are, so that later requests find its KV."""
    driver = drafted_driver(folders("qwen3_5", "right"))
    calls: list[int] = []
    head = driver.loaded.plan.prediction.module
    assert head is not None
    head.register_forward_hook(lambda *given: calls.append(len(given[2])))
    for number in range(5):
        driver.submit([number] * 4, 20)
    driver.run()
    assert driver.stats.drafted == 0
    assert len(calls) == 1, "all streams fill their block in the same step"
    assert calls == [5 * 16]


def test_first_tokens_of_all_streams_are_drafted_at_once(
    folders: Callable[[str, str], Path],
) -> None:
    driver = drafted_driver(folders("qwen3_5", "right"))
    calls: list[int] = []
    head = driver.loaded.plan.prediction.module
    assert head is not None
    head.register_forward_hook(lambda *given: calls.append(len(given[2])))
    for number in range(4):
        driver.submit([number], 7)
    driver.run()
    # The prompts' step yields one token each, and then a draft of one token each two more.
    assert driver.stats.step == 1 + 3
    assert driver.stats.drafted_right == driver.stats.drafted == 3 * 4
    # Of each stream the prompt's only position, then those of a known and of a drafted token.
    assert calls == [4, 8, 8]


def test_draft_without_finite_logits_is_empty(folders: Callable[[str, str], Path]) -> None:
    driver = drafted_driver(folders("qwen3_5", "right"))
    head = driver.loaded.plan.prediction.module
    assert head is not None
    head.norm.weight.fill_(float("nan"))
    request_id = driver.submit([1, 2, 3], 8)
    driver.run()
    assert len(driver.tokens(request_id)) == 8
    assert driver.stats.drafted == 0
