"""Drafts of a second model: the answers stay the same, and agreeing models save steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy import stats

from engine.protocol.generate import GenerateRequest, SamplingParams
from engine.protocol.sampling_parameters import PARAMETERS
from engine.runner.draft_model import DraftModel
from engine.scheduling.sequence import Sequence
from tests.engine.test_seeds import SETTINGS, request
from tests.support.drafts import run_with_aborts
from tests.support.driver import EXTREMES, Driver, each, tiny_llama
from tests.support.skipped_layers import with_first_layers

COUNT = 16
REQUESTS = range(len(SETTINGS))
# Penalties, biases and banned sequences are not drafted.
DRAFTED = {name for name, parameter in PARAMETERS.items() if parameter.kind != "penalty"}
PLAIN = [n for n in REQUESTS if set(SETTINGS[n]) <= DRAFTED]
# Prompts have up to 50 tokens: both models take several steps.
CHUNKS = {"max_num_batched_tokens": 16, "depth": 1, "late": True}
MODES = {"late": EXTREMES["late"], "torch": {"attention_backend": "torch"}, "chunks": CHUNKS}
# The share of drafted tokens that are right. Models with other weights agree sometimes, because
# they draw with the same noise; a model disagrees with itself where a penalty changes its logits.
SHARES = {"itself": (0.9, 1.0), "first-layers": (0.2, 0.6), "other": (0.0, 0.25)}


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[float]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of three layers, its first two layers, and a model with other weights."""
    root = tmp_path_factory.mktemp("drafts")
    model = tiny_llama(root / "model", num_hidden_layers=3)
    return {
        "itself": model,
        "first-layers": with_first_layers(model, root / "first-layers", 2),
        "other": tiny_llama(root / "other", num_hidden_layers=1, seed=1),
    }


@pytest.fixture(scope="module")
def due(folders: dict[str, Path]) -> list[Answer]:
    """The answer of each request alone, without drafts."""
    driver = Driver(folders["itself"], speculation="off", enable_prefix_caching=False)
    found = []
    for number in REQUESTS:
        request_id = submit(driver, number)
        driver.run()
        found.append(Answer(driver.tokens(request_id), driver.logprobs(request_id)))
    return found


def submit(driver: Driver, number: int, **more: Any) -> int:
    prompt, params = request(number)
    return driver.submit(prompt, COUNT, logprobs=1, **params, **more)


def drafted_driver(folders: dict[str, Path], draft: str, **fields: Any) -> Driver:
    return Driver(folders["itself"], speculative_model=str(folders[draft]), **fields)


def draft_model(driver: Driver) -> DraftModel:
    drafter = driver.loaded.drafter
    assert isinstance(drafter, DraftModel)
    return drafter


@pytest.mark.parametrize("draft", SHARES)
@pytest.mark.parametrize("mode", each(MODES))
@pytest.mark.variants(1)
def test_answers_and_logprobs_do_not_depend_on_the_draft_model(
    folders: dict[str, Path], due: list[Answer], mode: dict[str, Any], draft: str
) -> None:
    """Streams alone, then three at a time. Blocks are small, so that drafts end in the next one."""
    driver = drafted_driver(folders, draft, block_size=16, **mode)
    for together in (1, 3):
        for first in range(0, len(REQUESTS), together):
            started = {submit(driver, n): n for n in REQUESTS[first : first + together]}
            driver.run()
            for request_id, number in started.items():
                assert driver.tokens(request_id) == due[number].tokens
                assert driver.logprobs(request_id) == pytest.approx(due[number].logprobs, abs=2e-4)
    assert driver.stats.drafted > 40
    right = driver.stats.drafted_right / driver.stats.drafted
    low, high = SHARES[draft]
    assert low <= right <= high


@pytest.mark.parametrize("mode", each(EXTREMES))
def test_model_that_drafts_for_itself_is_always_right(
    folders: dict[str, Path], mode: dict[str, Any]
) -> None:
    """Sampled answers, too: both draw with the same noise."""
    driver = drafted_driver(folders, "itself", **mode)
    for first in range(0, len(PLAIN), 2):
        for number in PLAIN[first : first + 2]:
            submit(driver, number)
        driver.run()
    assert driver.stats.drafted > 60
    assert driver.stats.drafted_right == driver.stats.drafted


def test_right_drafts_save_steps(folders: dict[str, Path], due: list[Answer]) -> None:
    driver = drafted_driver(folders, "itself")
    request_id = submit(driver, 0)
    driver.run()
    assert driver.tokens(request_id) == due[0].tokens
    # The prompt's step yields one token, then drafts of 2, 4 and 6 tokens 3, 5 and the last 7.
    assert driver.stats.step == 1 + 3


@pytest.mark.parametrize("draft", ["itself", "first-layers"])
def test_drafts_do_not_outlive_preemption_and_aborts(
    folders: dict[str, Path], due: list[Answer], draft: str
) -> None:
    driver = drafted_driver(
        folders, draft, depth=1, late=True, block_size=16, num_gpu_blocks_override=9
    )
    ids: dict[int, int] = {}
    whole = run_with_aborts(driver, submit, (*REQUESTS, *REQUESTS), ids)
    assert driver.stats.drafted
    assert len(whole) >= 14
    for request_id in whole:
        assert driver.tokens(request_id) == due[ids[request_id]].tokens


def test_windowed_draft_model_drafts_beyond_its_window(tmp_path: Path) -> None:
    windowed = {"architectures": ["MistralForCausalLM"], "sliding_window": 20, "head_dim": 8}
    folder = tiny_llama(tmp_path / "m", **windowed)
    driver = Driver(folder, speculative_model=str(folder), block_size=16)
    driver.submit(request(1)[0], 90, temperature=1.0)
    driver.run()
    assert driver.stats.drafted > 40
    assert driver.stats.drafted_right == driver.stats.drafted


# ---- slots -----------------------------------------------------------------------------------


def conversation(driver: Driver, salts: tuple[str, str]) -> int:
    """Compute two turns of a conversation; return how many tokens the second one cost drafts."""
    prompt = request(2)[0]
    first = driver.submit(prompt, 8, salt=salts[0])
    driver.run()
    before = draft_model(driver).num_computed
    second = driver.submit([*prompt, *driver.tokens(first), 5, 6, 7], 8, salt=salts[1])
    driver.run()
    assert len(driver.tokens(second)) == 8
    return draft_model(driver).num_computed - before


def test_following_conversation_computes_only_its_new_tokens(folders: dict[str, Path]) -> None:
    length = len(request(2)[0]) + 8 + 3
    assert conversation(drafted_driver(folders, "itself"), ("", "")) < 3 + 2 * 8
    for driver, salts in (
        (drafted_driver(folders, "itself"), ("one", "two")),
        (drafted_driver(folders, "itself", enable_prefix_caching=False), ("", "")),
    ):
        assert conversation(driver, salts) >= length


def test_long_prompt_is_drafted_for_once_it_is_computed(folders: dict[str, Path]) -> None:
    driver = drafted_driver(folders, "itself")
    draft = DraftModel(draft_model(driver)._runner, 16, shares_prefixes=True)
    sequence = sequence_of(list(range(40)))
    assert [draft(sequence, 2) for _ in range(2)] == [[], []]
    assert draft.num_computed == 32
    assert len(draft(sequence, 2)) == 2
    assert draft.num_computed == 40 + 1


def sequence_of(tokens: list[int], row: int = 0) -> Sequence:
    """Return the record of a running sequence."""
    found = Sequence(GenerateRequest(row, tokens, SamplingParams(9, temperature=0.0), 0.0))
    found.row = row
    return found


def test_slot_of_a_running_sequence_is_taken_last(folders: dict[str, Path]) -> None:
    draft = draft_model(drafted_driver(folders, "itself"))
    prompt = list(range(30))
    running = [sequence_of([*prompt, 100 + row], row) for row in range(4)]
    for sequence in running:
        draft(sequence, 1)
    assert draft.num_computed == 4 * 31, "no sequence takes the slot of another one that runs"
    running[2].row = -1
    assert draft(sequence_of([*prompt, 102, 7], 5), 1)
    assert draft.num_computed == 4 * 31 + 1, "the tokens of the one that has ended are reused"
    assert draft(sequence_of(prompt, 6), 1)
    assert running[0] not in [slot.owner for slot in draft.slots]


def test_draft_ends_with_a_stop_token(folders: dict[str, Path]) -> None:
    draft = draft_model(drafted_driver(folders, "itself"))
    tokens = draft(sequence_of([1, 2, 3]), 6)
    assert len(tokens) == 6
    ended = sequence_of([1, 2, 3], row=1)
    ended.params = type(ended.params)(9, temperature=0.0, stop_token_ids=(tokens[2],))
    assert draft(ended, 6) == tokens[: tokens.index(tokens[2]) + 1]


def test_draft_ends_at_the_last_position_of_the_draft_model(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "m")
    short = tiny_llama(tmp_path / "short", max_position_embeddings=64)
    driver = Driver(folder, speculative_model=str(short))
    long = driver.submit(list(range(50)), 30, temperature=1.0)
    driver.run()
    assert len(driver.tokens(long)) == 30
    draft = draft_model(driver)
    drafted = [len(draft(sequence_of(list(range(length))), 4)) for length in (59, 60, 61, 64, 70)]
    assert drafted == [4, 4, 3, 0, 0]


def test_draft_without_finite_logits_is_empty_and_leaves_nothing(folders: dict[str, Path]) -> None:
    draft = draft_model(drafted_driver(folders, "itself"))
    sequence = sequence_of(list(range(20)))
    expected = draft(sequence, 3)
    draft._runner.kv.layers[0].values.fill_(float("nan"))
    sequence.tokens.append(5)
    assert draft(sequence, 3) == []
    sequence.tokens.pop()
    assert draft(sequence, 3) == expected


# ---- the distribution ------------------------------------------------------------------------


@pytest.mark.slow
def test_drafted_tokens_follow_the_models_distribution(folders: dict[str, Path]) -> None:
    """A chi-square test over seeds, on the second token: the first one that can be drafted."""
    temperature, most_likely = 1.5, 8
    driver = drafted_driver(folders, "first-layers")
    prompt = request(3)[0]
    sampling = {"temperature": temperature, "top_k": most_likely}
    ids = []
    for seed in range(600):
        ids.append(driver.submit(prompt, 3, seed=seed, **sampling))
        if len(ids) % 4 == 0:
            driver.run()
    assert driver.stats.drafted > 500
    assert 0 < driver.stats.drafted_right < driver.stats.drafted
    answers = [driver.tokens(request_id) for request_id in ids]
    firsts = [answer[0] for answer in answers]
    first = max(set(firsts), key=firsts.count)
    seconds = [answer[1] for answer in answers if answer[0] == first]
    probe = driver.submit([*prompt, first], 1, logprobs=most_likely)
    driver.run()
    entry = driver.outputs[probe][0].logprobs
    assert entry is not None
    scores = torch.tensor([logprob for _, logprob in entry.top], dtype=torch.float64)
    shares = (scores / temperature).softmax(0).numpy()
    observed = np.array([seconds.count(token) for token, _ in entry.top])
    assert observed.sum() == len(seconds) > 50
    assert stats.chisquare(observed, shares * len(seconds)).pvalue > 1e-4
