"""Golden tests: an architecture here against the same in `transformers`, on a tiny random model.

Adding an architecture is one test file with its Cases:

    @golden_tests([Case("plain", lambda: MistralConfig(**SMALL))])
    def test_golden(golden: Golden, equality: Equality) -> None:
        equality(golden)

Everything is fp32 on one thread. What our own engine must repeat it repeats bit by bit.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.runner.model_runner import ModelRunner
from tests.engine.driver import Driver
from tests.models.forward import chunked, forward, whole

BLOCK = 16
ANSWER = 40
LENGTHS = (1, 15, 16, 33, 60)  # with the answer up to seven blocks; windows should be below 60
TOLERANCE = {"rtol": 1e-4, "atol": 2e-4}  # logits are of the order of 10
Tensors = dict[str, torch.Tensor]
Answer = list[tuple[int, float]]  # (token, logprob)
Edit = Callable[[dict[str, Any], Tensors], None]  # changes config.json and tensors in place


@dataclass(frozen=True)
class Case:
    """One variant of an architecture.

    `without` are the keys of config.json that switch off what the case is about (None removes a
    key), `zeroed` parts of tensor names: the model must answer differently without each of them.
    """

    name: str
    config: Callable[[], Any]  # a transformers config
    edit: Edit | None = None  # how the checkpoint on disk differs from one saved today
    shard_size: str = "1GB"
    without: Mapping[str, Any] = field(default_factory=dict)
    zeroed: Sequence[str] = ()


class Golden:
    """A case made real: the reference model and its checkpoint in `folder`."""

    def __init__(self, case: Case, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.case, self.folder = case, folder
        config = case.config()
        config.eos_token_id = config.bos_token_id = config.pad_token_id = None
        self.reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        self.reference.eval()
        _randomise(self.reference, config.hidden_size)
        self.reference.save_pretrained(folder, max_shard_size=case.shard_size)
        if case.edit:
            edit_checkpoint(folder, case.edit)
        generator = torch.Generator().manual_seed(1)
        self.prompts: list[list[int]] = [
            torch.randint(config.vocab_size, (length,), generator=generator).tolist()
            for length in LENGTHS
        ]

    @cached_property
    def runner(self) -> ModelRunner:
        return load(self.folder)

    @cached_property
    def logits(self) -> torch.Tensor:
        """Of the longest prompt, by the reference."""
        with torch.inference_mode():
            return self.reference(torch.tensor([self.prompts[-1]])).logits[0]

    @cached_property
    def alone(self) -> list[Answer]:
        """Our greedy answers, one prompt at a time."""
        driver = self.driver(enable_prefix_caching=False)
        return [answers(driver, [prompt])[0] for prompt in self.prompts]

    def driver(self, **config: Any) -> Driver:
        return Driver(self.folder, **({"block_size": BLOCK, "max_num_seqs": 8} | config))


Equality = Callable[[Golden], None]


def load(folder: Path, **config: Any) -> ModelRunner:
    fields = {"dtype": "float32", "device": "cpu", "threads": 1, "block_size": BLOCK} | config
    return ModelRunner(EngineConfig(model=str(folder), **({"max_num_seqs": 8} | fields)))


def answers(driver: Driver, prompts: Sequence[list[int]]) -> list[Answer]:
    """All prompts at once, greedily."""
    ids = [driver.submit(prompt, ANSWER, logprobs=0) for prompt in prompts]
    driver.run()
    return [list(zip(driver.tokens(i), driver.logprobs(i), strict=True)) for i in ids]


def edit_checkpoint(folder: Path, edit: Edit) -> None:
    """Rewrite config.json and the one model.safetensors."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    edit(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


@torch.no_grad()
def _randomise(model: torch.nn.Module, hidden: int) -> None:
    """Weights so large that attention is sharp and every norm, bias and gate shows."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            parameter.copy_(noise * 2 * hidden**-0.5)
        else:
            parameter.copy_(noise * 0.5 + (1.0 if name.endswith("weight") else 0.0))


# ---- the equalities --------------------------------------------------------------------------


def full_prefill(golden: Golden) -> None:
    prompt = golden.prompts[-1]
    (logits,) = forward(golden.runner, [prompt], whole([prompt]))
    torch.testing.assert_close(logits, golden.logits, **TOLERANCE)


def chunked_prefill(golden: Golden) -> None:
    prompt = golden.prompts[-1]
    (expected,) = forward(golden.runner, [prompt], whole([prompt]))
    for size in (1, 3, BLOCK):
        (logits,) = forward(golden.runner, [prompt], chunked([prompt], size))
        torch.testing.assert_close(logits, golden.logits, **TOLERANCE)
        assert torch.equal(logits, expected), f"chunks of {size} change bits"


def greedy(golden: Golden) -> None:
    for prompt, answer in zip(golden.prompts, golden.alone, strict=True):
        if len(prompt) not in (1, 60):
            continue
        ids = torch.tensor([prompt])
        expected = golden.reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER, do_sample=False
        )[0, len(prompt) :].tolist()
        assert [token for token, _ in answer] == expected
    distinct = {token for answer in golden.alone for token, _ in answer}
    assert len(distinct) > 10, "a model that repeats itself tests little"


def ragged_batch(golden: Golden) -> None:
    assert answers(golden.driver(), golden.prompts) == golden.alone
    logits = forward(golden.runner, golden.prompts, chunked(golden.prompts, 7))
    for prompt, together in zip(golden.prompts, logits, strict=True):
        assert torch.equal(forward(golden.runner, [prompt], whole([prompt]))[0], together)


def prefix_hit(golden: Golden) -> None:
    driver = golden.driver()
    for expected_hit in (0, 48):  # three full blocks of the 60 tokens
        request = driver.submit(golden.prompts[-1], ANSWER, logprobs=0)
        driver.run()
        assert driver.cached_tokens(request) == expected_hit
        answer = list(zip(driver.tokens(request), driver.logprobs(request), strict=True))
        assert answer == golden.alone[-1]


def preempted(golden: Golden) -> None:
    driver = golden.driver(num_gpu_blocks_override=12, enable_prefix_caching=False)
    assert answers(driver, golden.prompts) == golden.alone
    assert driver.stats.preemptions, "the pool was meant to be too small"


def accounts_for_tensors(golden: Golden) -> None:
    """Any one tensor missing, and one too many, is an error that names it."""
    copy = golden.folder / "wrong"
    for name in sorted(load_file(golden.folder / "model.safetensors")):
        shutil.copytree(golden.folder, copy, ignore=shutil.ignore_patterns("wrong"))
        edit_checkpoint(copy, lambda config, tensors, name=name: tensors.pop(name))
        with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
            load(copy)
        shutil.rmtree(copy)
    shutil.copytree(golden.folder, copy, ignore=shutil.ignore_patterns("wrong"))
    edit_checkpoint(copy, lambda config, tensors: tensors.update({"model.surplus": torch.ones(1)}))
    with pytest.raises(ConfigError, match=r"model\.surplus"):
        load(copy)


def features_matter(golden: Golden) -> None:
    """Without what a case is about the logits are others: the case can fail."""
    case, prompt = golden.case, golden.prompts[-1]

    def difference(edit: Edit) -> float:
        copy = golden.folder / "without"
        shutil.copytree(golden.folder, copy, ignore=shutil.ignore_patterns("without", "wrong"))
        edit_checkpoint(copy, edit)
        (logits,) = forward(load(copy), [prompt], whole([prompt]))
        shutil.rmtree(copy)
        return float((logits - golden.logits).abs().max())

    def switch_off(config: dict[str, Any], tensors: Tensors) -> None:
        config.update(case.without)
        for key in [key for key, value in case.without.items() if value is None]:
            del config[key]

    if case.without:
        assert difference(switch_off) > 0.1, f"{list(case.without)} change nothing"
    for part in case.zeroed:

        def zero(config: dict[str, Any], tensors: Tensors, part: str = part) -> None:
            chosen = [name for name in tensors if part in name]
            assert chosen, f"no tensor is called {part}"
            for name in chosen:
                tensors[name].zero_()

        assert difference(zero) > 0.1, f"{part} changes nothing"


EQUALITIES: Sequence[Equality] = (
    full_prefill,
    chunked_prefill,
    greedy,
    ragged_batch,
    prefix_hit,
    preempted,
    accounts_for_tensors,
)


def golden_tests(
    cases: Sequence[Case], equalities: Sequence[Equality] = EQUALITIES
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test(golden, equality) for every pair; features_matter is added where it applies."""
    pairs = [
        (case, equality)
        for case in cases
        for equality in (*equalities, *([features_matter] if case.without or case.zeroed else ()))
    ]
    return pytest.mark.parametrize(
        ("golden", "equality"),
        pairs,
        ids=[f"{case.name}-{equality.__name__}" for case, equality in pairs],
        indirect=["golden"],
    )
