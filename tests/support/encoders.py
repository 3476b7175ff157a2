"""Golden tests of encoders: hidden states and vectors against `transformers` in float64.

Everything of ours but `bfloat16` is fp32 on one thread.

@encoder_tests([EncoderCase("plain", lambda: BertConfig(**SMALL))])
def test_bert_matches_transformers(encoder: Encoder, equality: Equality) -> None:
    equality(encoder)
"""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.errors import ConfigError
from engine.runner.encoder import build_encoder_batch
from engine.runner.model_runner import ModelRunner
from engine.scheduling.step import EncoderInput
from tests.support.driver import EAGER, Driver
from tests.support.golden import (
    BLOCK,
    Edit,
    each_feature_matters,
    edit_checkpoint,
    every_pair,
    load,
    randomise,
)
from tests.support.thorough import is_thorough

LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5)
# Hidden states follow a norm: they are of the order of 1, and the largest is about 7. The reference
# computes in float64, because its own rounding in fp32 is as large as ours.
TOLERANCE = 1e-5
# With a gain of 2, the gates of ModernBERT and Nomic make rounding grow to 8e-5 in transformers.
GAIN = 1
VISIBLE = 0.05
CLOSE_IN_BF16 = 1e-4  # 1 - cosine


@dataclass(frozen=True, eq=False)  # compared by identity, as the key of a cache
class EncoderCase:
    """One variant of an architecture. `model` is the transformers class that is saved.

    `without`, `zeroed` and `replaced` list the features under test. Without any one of them the
    hidden states must differ. `without` has values of config.json that switch a feature off,
    `zeroed` parts of tensor names, and `replaced` our functions with their stand-ins.
    """

    name: str
    config: Callable[[], Any]  # a transformers config
    model: str = "AutoModel"
    edit: Edit | None = None  # changes the checkpoint that today's transformers saves
    without: Mapping[str, Any] = field(default_factory=dict)
    zeroed: Sequence[str] = ()
    replaced: Mapping[str, Any] = field(default_factory=dict)


class Encoder:
    """The reference model of a case and its checkpoint in `folder`."""

    def __init__(self, case: EncoderCase, folder: Path) -> None:
        import transformers

        self.case, self.folder = case, folder
        config = case.config()
        build = getattr(transformers, case.model)
        whole = build.from_config(config) if case.model.startswith("Auto") else build(config)
        self.reference = whole.base_model.eval()
        self._randomise(whole, config.hidden_size)
        whole.save_pretrained(folder)
        if case.edit:
            edit_checkpoint(folder, case.edit)
        generator = torch.Generator().manual_seed(1)
        self.texts: list[list[int]] = [
            torch.randint(config.vocab_size, (length,), generator=generator).tolist()
            for length in LENGTHS
        ]

    def _randomise(self, whole: torch.nn.Module, hidden: int) -> None:
        """Randomise all weights except the tables of sinusoids."""
        tables = {n: p.clone() for n, p in whole.named_parameters() if "embed_positions" in n}
        randomise(whole, hidden, GAIN)
        whole.load_state_dict(tables, strict=False)

    @cached_property
    def runner(self) -> ModelRunner:
        return load(self.folder)

    @cached_property
    def expected(self) -> list[torch.Tensor]:
        """Hidden states [tokens, hidden] of each text, by the reference in float64, one by one."""
        exact = in_float64(self.reference)
        with torch.inference_mode():
            return [exact(torch.tensor([text])).last_hidden_state[0] for text in self.texts]

    def driver(self, **config: Any) -> Driver:
        return Driver(self.folder, **({"block_size": BLOCK, "max_num_seqs": 8} | config))


Equality = Callable[[Encoder], None]


@torch.inference_mode()
def hidden_states(runner: ModelRunner, texts: Sequence[list[int]]) -> list[torch.Tensor]:
    """Return hidden states [tokens, hidden] of each text, all computed in one batch."""
    encoder_inputs = [EncoderInput(i, tuple(text), is_pooled=True) for i, text in enumerate(texts)]
    batch = build_encoder_batch(encoder_inputs, runner.kv, runner.backend, runner.device)
    return list(runner.model.encode(batch).split([len(text) for text in texts]))


def in_float64(reference: Any) -> Any:
    """Return a copy of a transformers model that computes in float64.

    The kernels of its experts have no float64, so they are computed one by one
    (findings/experts_in_float64.sh).
    """
    exact = copy.deepcopy(reference).double()
    exact.set_experts_implementation("eager")
    return exact


def check_exact(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Check our numbers in fp32 against the reference's in float64."""
    assert exact.dtype == torch.float64
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=TOLERANCE)


def alone(encoder: Encoder) -> None:
    for text, expected in zip(encoder.texts, encoder.expected, strict=True):
        (hidden,) = hidden_states(encoder.runner, [text])
        check_exact(hidden, expected)


def ragged_batch(encoder: Encoder) -> None:
    for texts in (encoder.texts, encoder.texts[::-1]):
        for text, hidden in zip(texts, hidden_states(encoder.runner, texts), strict=True):
            assert torch.equal(hidden, hidden_states(encoder.runner, [text])[0])


def pooled_vectors(encoder: Encoder) -> None:
    """The engine's vectors match the reference, in one step or several."""
    for mode in EAGER.values():
        for budget, pooling in ((1, "cls"), (40, "mean"), (1000, "last")):
            driver = encoder.driver(max_num_encoder_tokens=budget, pooling=pooling, **mode)
            ids = [driver.embed(text) for text in encoder.texts]
            driver.run()
            for number, expected in zip(ids, encoder.expected, strict=True):
                wanted = {"mean": expected.mean(0), "cls": expected[0], "last": expected[-1]}
                check_exact(driver.vector(number), wanted[pooling])


def accounts_for_tensors(encoder: Encoder) -> None:
    """A missing tensor that the hidden states need, or an extra one, is an error naming it.

    One of each kind is tried.
    """
    names = sorted(load_file(encoder.folder / "model.safetensors"))
    names = [name for name in names if "pooler" not in name and "embed_positions" not in name]
    kinds = {re.sub(r"\d+", "", name): name for name in names}  # those of the last layer
    for name in names if is_thorough() else kinds.values():
        refused(encoder, lambda config, tensors, name=name: tensors.pop(name), name)
    surplus = {"encoder.surplus.weight": torch.ones(1)}
    refused(encoder, lambda config, tensors: tensors.update(surplus), "encoder.surplus.weight")


def refused(encoder: Encoder, edit: Edit, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(edited(encoder, edit))
    assert named in str(caught.value)


def edited(encoder: Encoder, edit: Edit) -> Path:
    other = encoder.folder.with_name(encoder.folder.name + "-edited")
    shutil.copytree(encoder.folder, other, dirs_exist_ok=True)
    edit_checkpoint(other, edit)
    return other


def bfloat16(encoder: Encoder) -> None:
    """In bfloat16, vectors of texts keep their direction as well as those of the reference.

    The weights of tests are so large that it may turn them more than CLOSE_IN_BF16. Ours may then
    turn by 1.5 times that angle.
    """
    runner = load(encoder.folder, dtype="bfloat16")
    rounded = copy.deepcopy(encoder.reference).bfloat16()
    ours, theirs = 0.0, 0.0
    for text, expected in zip(encoder.texts, encoder.expected, strict=True):
        ours += _turn(hidden_states(runner, [text])[0], expected)
        with torch.inference_mode():
            theirs += _turn(rounded(torch.tensor([text])).last_hidden_state[0], expected)
    assert ours < max(CLOSE_IN_BF16 * len(encoder.texts), 1.5**2 * theirs)


def _turn(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return 1 - cosine of the means of two texts' hidden states [tokens, hidden]."""
    means = found.double().mean(0), expected.double().mean(0)
    return 1 - float(torch.cosine_similarity(*means, dim=0))


def features_matter(encoder: Encoder) -> None:
    """Removing a feature under test changes the hidden states, so the case can fail."""

    def difference(edit: Edit) -> float:
        (hidden,) = hidden_states(load(edited(encoder, edit)), encoder.texts[-1:])
        return float((hidden - encoder.expected[-1]).abs().max())

    each_feature_matters(encoder.case, difference, VISIBLE)


EQUALITIES: Sequence[Equality] = (
    alone,
    ragged_batch,
    pooled_vectors,
    bfloat16,
    accounts_for_tensors,
)
# A model that mostly consists of tested parts proves these in each run; the rest is slow.
FEW = (alone, ragged_batch, accounts_for_tensors)


def encoder_tests(
    cases: Sequence[EncoderCase],
    equalities: Sequence[Equality] = EQUALITIES,
    quick: Sequence[Equality] = EQUALITIES,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test(encoder, equality) for every pair; add features_matter if the case lists any.

    Equalities that are not `quick` run in `make test-slow`.
    """
    return every_pair("encoder", cases, equalities, features_matter, quick)
