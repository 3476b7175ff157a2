"""Golden tests: an architecture here against the same in `transformers`, on a tiny random model.

Adding an architecture is one test file with its Cases:

    @golden_tests([Case("plain", lambda: MistralConfig(**SMALL))])
    def test_golden(golden: Golden, equality: Equality) -> None:
        equality(golden)

Everything is fp32 on one thread. What our own engine must repeat it repeats bit by bit.
"""

from __future__ import annotations

import copy
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
from engine.layers.attention import RotaryAttention
from engine.runner.model_runner import ModelRunner
from tests.engine.driver import Driver
from tests.models.forward import chunked, forward, whole

BLOCK = 16
ANSWER = 40
LENGTHS = (1, 15, 16, 33, 60)  # with the answer up to seven blocks
SOURCES = (37, 5, 60, 1, 18)  # what an encoder–decoder's answers are to
WINDOW = 20  # of the windowed models: no multiple of a block
WINDOW_LENGTHS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW)
TOLERANCE = {"rtol": 1e-4, "atol": 2e-4}  # logits are of the order of 10
FEW_BITS = 0.05  # share of logits that bfloat16 may change
VISIBLE = 0.1  # a difference of logits no rounding explains
Tensors = dict[str, torch.Tensor]
Answer = list[tuple[int, float]]  # (token, logprob)
Edit = Callable[[dict[str, Any], Tensors], None]  # changes config.json and tensors in place


@dataclass(frozen=True, eq=False)  # each is itself alone: the key of what is made of it
class Case:
    """One variant of an architecture.

    The model must answer differently without each thing the case is about, removed by itself:
    `without` are values of config.json that switch one off (None removes a key), `zeroed` parts of
    tensor names, `replaced` functions of ours by their import path and what stands in for them.
    `reference` makes, of the config and in the folder of the checkpoint, a reference that is not of
    transformers; it is called like one of those, as far as the equalities do it.
    """

    name: str
    config: Callable[[], Any]  # a transformers config, or one `reference` understands
    edit: Edit | None = None  # how the checkpoint on disk differs from one saved today
    shard_size: str = "1GB"
    without: Mapping[str, Any] = field(default_factory=dict)
    zeroed: Sequence[str] = ()
    replaced: Mapping[str, Any] = field(default_factory=dict)
    lengths: Sequence[int] = LENGTHS
    reference: Callable[[Any, Path], Any] | None = None


class Golden:
    """A case made real: the reference model and its checkpoint in `folder`.

    The prompts of an encoder–decoder are how its answers begin; it also has `sources`, else [].
    """

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        config = case.config()
        if case.reference:
            self.reference, vocab_size = case.reference(config, folder), config.vocab_size
        else:
            self.reference = of_transformers(config, folder, case.shard_size)
            vocab_size = config.get_text_config().vocab_size
        if case.edit:
            edit_checkpoint(folder, case.edit)
        generator = torch.Generator().manual_seed(1)
        two_sided = getattr(config, "is_encoder_decoder", False)
        start = [config.decoder_start_token_id] if two_sided else []

        def draw(length: int) -> list[int]:
            return torch.randint(vocab_size, (length,), generator=generator).tolist()

        self.prompts = [(start + draw(length))[:length] for length in case.lengths]
        self.sources = [draw(length) if two_sided else [] for length in SOURCES]

    @cached_property
    def runner(self) -> ModelRunner:
        return load(self.folder)

    @cached_property
    def logits(self) -> torch.Tensor:
        """Of the longest prompt, by the reference."""
        with torch.inference_mode():
            return self.reference(**self.inputs(-1)).logits[0]

    @cached_property
    def alone(self) -> list[Answer]:
        """Our greedy answers, one prompt at a time."""
        driver = self.driver(enable_prefix_caching=False)
        pairs = zip(self.prompts, self.sources, strict=True)
        return [answers(driver, [prompt], [source])[0] for prompt, source in pairs]

    def inputs(self, index: int, answer: Sequence[int] = ()) -> dict[str, torch.Tensor]:
        """What the reference takes for a prompt and what has been answered."""
        prompt = torch.tensor([[*self.prompts[index], *answer]])
        source = torch.tensor([self.sources[index]])
        return (
            {"input_ids": source, "decoder_input_ids": prompt}
            if source.numel()
            else {"input_ids": prompt}
        )

    def driver(self, **config: Any) -> Driver:
        return Driver(self.folder, **({"block_size": BLOCK, "max_num_seqs": 8} | config))


Equality = Callable[[Golden], None]


def load(folder: Path, **config: Any) -> ModelRunner:
    fields = {"dtype": "float32", "device": "cpu", "threads": 1, "block_size": BLOCK} | config
    return ModelRunner(EngineConfig(model=str(folder), **({"max_num_seqs": 8} | fields)))


def answers(
    driver: Driver, prompts: Sequence[list[int]], sources: Sequence[list[int]]
) -> list[Answer]:
    """All prompts at once, greedily."""
    ids = [
        driver.submit(prompt, ANSWER, source=source, logprobs=0)
        for prompt, source in zip(prompts, sources, strict=True)
    ]
    driver.run()
    return [list(zip(driver.tokens(i), driver.logprobs(i), strict=True)) for i in ids]


def rescored(driver: Driver, golden: Golden) -> list[Answer]:
    """The answers once more, as ends of prompts that are scored: each token the likeliest there."""
    wholes = [
        [*prompt, *(token for token, _ in answer)]
        for prompt, answer in zip(golden.prompts, golden.alone, strict=True)
    ]
    ids = [
        driver.submit(whole, 1, source=source, prompt_logprobs=1)
        for whole, source in zip(wholes, golden.sources, strict=True)
    ]
    driver.run()
    scores = [driver.outputs[request][0].prompt_logprobs[-ANSWER:] for request in ids]
    return [[(score.top[0][0], score.logprob) for score in answer] for answer in scores]


def edit_checkpoint(folder: Path, edit: Edit) -> None:
    """Rewrite config.json and the one model.safetensors."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    edit(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


def of_transformers(
    config: Any,
    folder: Path,
    shard_size: str = "1GB",
    prepare: Callable[[Any], None] = lambda model: None,
) -> Any:
    """The reference, saved in `folder`; `prepare` is what else is done to its random weights."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    text, kind = config.get_text_config(), AutoModelForCausalLM
    start = getattr(config, "pad_token_id", None)
    for part in (config, text):
        part.eos_token_id = part.bos_token_id = part.pad_token_id = None
    if config.is_encoder_decoder:
        config.pad_token_id = config.decoder_start_token_id = start
        kind = AutoModelForSeq2SeqLM
    model = kind.from_config(config, attn_implementation="eager").eval()
    randomise(model, text.hidden_size)
    prepare(model)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model


@torch.no_grad()
def randomise(model: torch.nn.Module, hidden: int) -> None:
    """Weights so large that attention is sharp and every norm, bias and gate shows."""
    generator = torch.Generator().manual_seed(0)
    learned = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    learned += [(name, b) for name, b in model.named_buffers() if name == "final_logits_bias"]
    for _, parameter in sorted(learned):
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            parameter.copy_(noise * 2 * hidden**-0.5)
        else:
            parameter.add_(noise * 0.5)  # to what it begins as: norms at one or, Gemma's, at zero


def last_logits(golden: Golden, runner: ModelRunner, size: int | None = None) -> torch.Tensor:
    """Ours, of the longest prompt, in chunks of `size`; None is the whole."""
    prompts, sources = golden.prompts[-1:], golden.sources[-1:]
    plan = whole(prompts) if size is None else chunked(prompts, size)
    return forward(runner, prompts, plan, sources)[0]


# ---- the equalities --------------------------------------------------------------------------


def full_prefill(golden: Golden) -> None:
    logits = last_logits(golden, golden.runner)
    torch.testing.assert_close(logits, golden.logits, **TOLERANCE)


def chunked_prefill(golden: Golden) -> None:
    expected = last_logits(golden, golden.runner)
    for size in (1, 3, BLOCK):
        logits = last_logits(golden, golden.runner, size)
        torch.testing.assert_close(logits, golden.logits, **TOLERANCE)
        assert torch.equal(logits, expected), f"chunks of {size} change bits"


def greedy(golden: Golden) -> None:
    """Each token is the reference's likeliest after all before it: what it would have written."""
    for index, (prompt, answer) in enumerate(zip(golden.prompts, golden.alone, strict=True)):
        tokens = [token for token, _ in answer]
        assert len(tokens) == ANSWER
        with torch.inference_mode():
            logits = golden.reference(**golden.inputs(index, tokens[:-1])).logits[0]
        assert tokens == logits[len(prompt) - 1 :].argmax(-1).tolist()
    distinct = {token for answer in golden.alone for token, _ in answer}
    assert len(distinct) > 10, "a model that repeats itself tests little: untie it, or other sizes"


def ragged_batch(golden: Golden) -> None:
    prompts, sources = golden.prompts, golden.sources
    assert answers(golden.driver(), prompts, sources) == golden.alone
    logits = forward(golden.runner, prompts, chunked(prompts, 7), sources)
    for prompt, source, together in zip(prompts, sources, logits, strict=True):
        (alone,) = forward(golden.runner, [prompt], whole([prompt]), [source])
        assert torch.equal(alone, together)


def captured(golden: Golden) -> None:
    """Recorded decodes and chunks, replayed over poisoned memory; a source's are not recorded."""
    driver = golden.driver(captured=True, depth=1, max_num_batched_tokens=32)
    plain = [
        driver.submit(prompt, ANSWER, source=source)
        for prompt, source in zip(golden.prompts, golden.sources, strict=True)
    ]
    driver.run()
    answered = [[token for token, _ in answer] for answer in golden.alone]
    assert [driver.tokens(request) for request in plain] == answered
    assert answers(driver, golden.prompts, golden.sources) == golden.alone, "drawn eagerly"
    driver.check_static()


def prefix_hit(golden: Golden) -> None:
    driver = golden.driver()
    prompt, source = golden.prompts[-1], golden.sources[-1]
    for expected_hit in (0, 48 + len(source)):  # three full blocks of the 60 tokens
        request = driver.submit(prompt, ANSWER, source=source, logprobs=0)
        driver.run()
        assert driver.cached_tokens(request) == expected_hit
        answer = list(zip(driver.tokens(request), driver.logprobs(request), strict=True))
        assert answer == golden.alone[-1]


def scored(golden: Golden) -> None:
    """An answer as part of the prompt is as likely as it was when it was written, to the bit."""
    assert rescored(golden.driver(max_num_batched_tokens=BLOCK), golden) == golden.alone


def preempted(golden: Golden) -> None:
    blocks = 12 * len(golden.runner.kv.groups)
    driver = golden.driver(num_gpu_blocks_override=blocks, enable_prefix_caching=False)
    assert answers(driver, golden.prompts, golden.sources) == golden.alone
    assert driver.stats.preemptions, "the pool was meant to be too small"


def refusal(golden: Golden, edit: Edit) -> str:
    """What the loader says of the checkpoint once it is edited."""
    copy = golden.folder / "edited"
    shutil.copytree(golden.folder, copy, ignore=shutil.ignore_patterns("edited"))
    edit_checkpoint(copy, edit)
    with pytest.raises(ConfigError) as caught:
        load(copy)
    shutil.rmtree(copy)
    return str(caught.value)


def bfloat16(golden: Golden) -> None:
    """What a CPU serves by default: every tensor has its dtype, and little more is lost to it than
    the reference loses, which rounds elsewhere."""
    limit = FEW_BITS * float(golden.logits.norm(dim=-1).median())
    if isinstance(golden.reference, torch.nn.Module):
        rounded = copy.deepcopy(golden.reference).bfloat16()
        with torch.inference_mode():
            limit = 1.5 * _error(golden, rounded(**golden.inputs(-1)).logits[0])
    for backend in ("torch",) if any(golden.sources) else ("torch", "numba"):
        runner = load(golden.folder, dtype="bfloat16", attention_backend=backend)
        for size in (None, 1):
            assert _error(golden, last_logits(golden, runner, size)) < limit, (backend, size)


def _error(golden: Golden, logits: torch.Tensor) -> float:
    """Of a token in the middle of all tokens."""
    return float((logits.float() - golden.logits).norm(dim=-1).median())


def numba(golden: Golden) -> None:
    """By kernels compiled for a CPU; or refused at start, with the reason."""
    if any(golden.sources):
        with pytest.raises(ConfigError, match="numba"):
            load(golden.folder, attention_backend="numba")
        return
    answered = [[token for token, _ in answer] for answer in golden.alone]
    driver = golden.driver(attention_backend="numba")
    pairs = answers(driver, golden.prompts, golden.sources)
    assert [[token for token, _ in answer] for answer in pairs] == answered
    runner = load(golden.folder, attention_backend="numba")
    torch.testing.assert_close(last_logits(golden, runner), golden.logits, **TOLERANCE)
    torch.testing.assert_close(last_logits(golden, runner, 7), golden.logits, **TOLERANCE)


def accounts_for_tensors(golden: Golden) -> None:
    """Any one tensor missing, and one too many, is an error that names it."""
    for name in sorted(load_file(golden.folder / "model.safetensors")):
        assert name in refusal(golden, lambda config, tensors, name=name: tensors.pop(name))
    surplus = {"model.surplus": torch.ones(1)}
    assert "model.surplus" in refusal(golden, lambda config, tensors: tensors.update(surplus))


def difference(golden: Golden, edit: Edit) -> float:
    """How far the longest prompt's logits are off once the checkpoint is edited."""
    copy = golden.folder / "edited"
    shutil.copytree(golden.folder, copy, ignore=shutil.ignore_patterns("edited"))
    edit_checkpoint(copy, edit)
    logits = last_logits(golden, load(copy))
    shutil.rmtree(copy)
    return float((logits - golden.logits).abs().max())


def setting(key: str, value: Any) -> Edit:
    """config.json with another value; None removes the key."""

    def edit(config: dict[str, Any], tensors: Tensors) -> None:
        config[key] = value
        if value is None:
            del config[key]

    return edit


def zeroing(part: str) -> Edit:
    """Zeros in every tensor whose name has `part` in it."""

    def edit(config: dict[str, Any], tensors: Tensors) -> None:
        chosen = [name for name in tensors if part in name]
        assert chosen, f"no tensor is called {part}"
        for name in chosen:
            tensors[name].zero_()

    return edit


def features_matter(golden: Golden) -> None:
    """Without what a case is about the logits are others: the case can fail."""
    each_feature_matters(golden.case, lambda edit: difference(golden, edit), VISIBLE)


def each_feature_matters(case: Any, difference: Callable[[Edit], float], visible: float) -> None:
    """`difference`: how far what is computed with an edited checkpoint is from the reference."""
    for key, value in case.without.items():
        assert difference(setting(key, value)) > visible, f"{key} changes nothing"
    for part in case.zeroed:
        assert difference(zeroing(part)) > visible, f"{part} changes nothing"
    for path, stand_in in case.replaced.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(path, stand_in)
            assert difference(lambda config, tensors: None) > visible, f"{path} changes nothing"


def unnormalised(self: RotaryAttention, *args: Any) -> torch.Tensor:
    """Stands in for RotaryAttention.forward: without the norms of queries and keys."""
    self.q_norm = self.k_norm = None
    return _rotary_attention(self, *args)


_rotary_attention = RotaryAttention.forward


def window_is_exact(golden: Golden) -> None:
    """One key more or less in view would be seen."""
    window = json.loads((golden.folder / "config.json").read_text())["sliding_window"]
    for other in (window - 1, window + 1):
        assert difference(golden, setting("sliding_window", other)) > VISIBLE


EQUALITIES: Sequence[Equality] = (
    full_prefill,
    chunked_prefill,
    greedy,
    ragged_batch,
    captured,
    prefix_hit,
    scored,
    preempted,
    bfloat16,
    numba,
    accounts_for_tensors,
)


def golden_tests(
    cases: Sequence[Case], equalities: Sequence[Equality] = EQUALITIES
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test(golden, equality) for every pair; features_matter is added where it applies."""
    return every_pair("golden", cases, equalities, features_matter)


def every_pair(
    fixture: str,
    cases: Sequence[Any],
    equalities: Sequence[Callable[[Any], None]],
    features_matter: Callable[[Any], None],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    pairs = []
    for case in cases:
        pairs += [(case, equality) for equality in equalities]
        if case.without or case.zeroed or case.replaced:
            pairs.append((case, features_matter))
    return pytest.mark.parametrize(
        (fixture, "equality"),
        pairs,
        ids=[f"{case.name}-{equality.__name__}" for case, equality in pairs],
        indirect=[fixture],
    )
