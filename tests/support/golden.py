"""Golden tests: our models against those of `transformers`, with tiny random weights.

A new architecture needs one test file with its Cases:

    @golden_tests([Case("plain", lambda: MistralConfig(**SMALL))])
    def test_mistral_matches_transformers(golden: Golden, equality: Equality) -> None:
        equality(golden)

Everything is fp32 on one thread. Where our engine must repeat its own results, all bits are equal.
"""

from __future__ import annotations

import copy
import json
import re
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
from engine.layers.attention import RotaryAttention, kv_specs
from engine.runner.load import load_engine
from engine.runner.model_runner import ModelRunner
from tests.support.driver import Driver
from tests.support.forward import chunked, forward, whole
from tests.support.thorough import is_thorough

BLOCK = 16
ANSWER = 24
LENGTHS = (1, 15, 16, 33, 60)  # up to six blocks with the answer
SOURCES = (37, 5, 60, 1, 18)  # lengths of the source texts of an encoder–decoder
WINDOW = 20  # of windowed models; not a multiple of the block size
WINDOW_LENGTHS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW)
TOLERANCE = {"rtol": 1e-4, "atol": 2e-4}  # logits are of the order of 10
FEW_BITS = 0.05  # relative change of the logits that bfloat16 may cause
# Buffers that a checkpoint has, unlike tables that are computed.
LEARNED_BUFFERS = ("final_logits_bias", "layer_scalar", "e_score_correction_bias")
VISIBLE = 0.1  # a difference of logits that rounding cannot explain
Tensors = dict[str, torch.Tensor]
Answer = list[tuple[int, float]]  # (token, logprob)
Edit = Callable[[dict[str, Any], Tensors], None]  # changes config.json and tensors in place


@dataclass(frozen=True, eq=False)  # compared by identity, as the key of a cache
class Case:
    """One variant of an architecture.

    `without`, `zeroed` and `replaced` list the features under test. Without any one of them the
    logits must differ. `without` has values of config.json that switch a feature off (None removes
    the key), `zeroed` parts of tensor names, and `replaced` import paths of our functions with
    their stand-ins. `reference` builds another reference than transformers, from the config and in
    the folder of the checkpoint. It is called like a transformers model.
    """

    name: str
    config: Callable[[], Any]  # a transformers config, or one `reference` understands
    edit: Edit | None = None  # changes the checkpoint that today's transformers saves
    shard_size: str = "1GB"
    without: Mapping[str, Any] = field(default_factory=dict)
    zeroed: Sequence[str] = ()
    replaced: Mapping[str, Any] = field(default_factory=dict)
    lengths: Sequence[int] = LENGTHS
    reference: Callable[[Any, Path], Any] | None = None


class Golden:
    """The reference model of a case and its checkpoint in `folder`.

    For an encoder–decoder, `sources` are the encoder prompts and `prompts` the beginnings of the
    answers. For other models every source is [].
    """

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        config = case.config()
        if case.reference:
            self.reference = case.reference(config, folder)
        else:
            self.reference = of_transformers(config, folder, case.shard_size)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        vocab_size = text.vocab_size
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
        """The reference's logits [tokens, vocabulary] of the longest prompt."""
        with torch.inference_mode():
            return self.reference(**self.inputs(-1)).logits[0]

    @cached_property
    def alone(self) -> list[Answer]:
        """Our greedy answers, computed one prompt at a time."""
        driver = self.driver(enable_prefix_caching=False)
        pairs = zip(self.prompts, self.sources, strict=True)
        return [answers(driver, [prompt], [source])[0] for prompt, source in pairs]

    def inputs(self, index: int, answer: Sequence[int] = ()) -> dict[str, torch.Tensor]:
        """Return the reference's arguments for a prompt followed by an answer."""
        prompt = torch.tensor([[*self.prompts[index], *answer]])
        source = torch.tensor([self.sources[index]])
        return (
            {"input_ids": source, "decoder_input_ids": prompt}
            if source.numel()
            else {"input_ids": prompt}
        )

    def driver(self, **config: Any) -> Driver:
        # Thousands of states, which are checked after each turn, would take seconds.
        small = {"block_size": BLOCK, "max_num_seqs": 8, "state_memory_bytes": 2**21}
        return Driver(self.folder, **(small | config))


Equality = Callable[[Golden], None]


def load(folder: Path, **config: Any) -> ModelRunner:
    fields = {"dtype": "float32", "device": "cpu", "threads": 1, "block_size": BLOCK} | config
    return load_engine(EngineConfig(model=str(folder), **({"max_num_seqs": 8} | fields))).runner


def answers(
    driver: Driver, prompts: Sequence[list[int]], sources: Sequence[list[int]]
) -> list[Answer]:
    """Return the greedy answers to all prompts, computed together."""
    ids = [
        driver.submit(prompt, ANSWER, source=source, logprobs=0)
        for prompt, source in zip(prompts, sources, strict=True)
    ]
    driver.run()
    return [list(zip(driver.tokens(i), driver.logprobs(i), strict=True)) for i in ids]


def rescored(driver: Driver, golden: Golden) -> list[Answer]:
    """Return the answers as read from prompt logprobs: the top token and the logprob of each token.

    Each answer is submitted as the end of its prompt.
    """
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
    """Apply `edit` to config.json and model.safetensors of a checkpoint without shards."""
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
    """Return a transformers model with random weights, saved in `folder`.

    `prepare` may change the random weights before they are saved.
    """
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSeq2SeqLM,
    )

    text, kind = config.get_text_config(), AutoModelForCausalLM
    known = AutoModelForCausalLM._model_mapping
    # Of some multimodal configs transformers' causal model is the language model alone.
    if type(config) not in known or known[type(config)].config_class is not type(config):
        kind = AutoModelForImageTextToText
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
def randomise(model: torch.nn.Module, hidden: int, gain: float = 2) -> None:
    """Set random weights, so large that attention is sharp and all norms, biases and gates matter.

    A matrix of hidden columns makes its input about `gain` times as large. The seed is fixed.
    """
    generator = torch.Generator().manual_seed(0)
    learned = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    learned += [(name, b) for name, b in model.named_buffers() if name.endswith(LEARNED_BUFFERS)]
    for name, parameter in sorted(learned):
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("A_log"):  # decays start at large random numbers
            parameter.zero_()
        if parameter.dim() > 1:
            parameter.copy_(noise * gain * hidden**-0.5)
        else:
            # Norms start at one, Gemma's at zero, and some parameters at small random numbers.
            parameter.round_().add_(noise * 0.5)


def last_logits(golden: Golden, runner: ModelRunner, size: int | None = None) -> torch.Tensor:
    """Return our logits of the longest prompt, computed in chunks of `size` (None: at once)."""
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
    """Each token is the one that the reference finds most likely after the previous tokens."""
    for index, (prompt, answer) in enumerate(zip(golden.prompts, golden.alone, strict=True)):
        tokens = [token for token, _ in answer]
        assert len(tokens) == ANSWER
        with torch.inference_mode():
            logits = golden.reference(**golden.inputs(index, tokens[:-1])).logits[0]
        assert tokens == logits[len(prompt) - 1 :].argmax(-1).tolist()
    distinct = {token for answer in golden.alone for token, _ in answer}
    assert len(distinct) > 10, "the model repeats itself: untie its head or change sizes"


def ragged_batch(golden: Golden) -> None:
    prompts, sources = golden.prompts, golden.sources
    assert answers(golden.driver(), prompts, sources) == golden.alone
    logits = forward(golden.runner, prompts, chunked(prompts, 7), sources)
    for prompt, source, together in zip(prompts, sources, logits, strict=True):
        (alone,) = forward(golden.runner, [prompt], whole([prompt]), [source])
        assert torch.equal(alone, together)


def captured(golden: Golden) -> None:
    """Captured decodes and chunks, replayed over poisoned memory, match; encoders run eagerly."""
    driver = golden.driver(captured=True, depth=1, max_num_batched_tokens=32)
    plain = [
        driver.submit(prompt, ANSWER, source=source)
        for prompt, source in zip(golden.prompts, golden.sources, strict=True)
    ]
    driver.run()
    answered = [[token for token, _ in answer] for answer in golden.alone]
    assert [driver.tokens(request) for request in plain] == answered
    eager = golden.driver(attention_backend="torch")  # as in captured steps on a CPU
    expected = answers(eager, golden.prompts, golden.sources)
    assert answers(driver, golden.prompts, golden.sources) == expected, "drawn eagerly"
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
    """Prompt logprobs of an answer equal, bit for bit, its logprobs when it was generated."""
    assert rescored(golden.driver(max_num_batched_tokens=BLOCK), golden) == golden.alone


def preempted(golden: Golden) -> None:
    blocks = 8 * len(golden.runner.kv.groups)
    driver = golden.driver(num_gpu_blocks_override=blocks, enable_prefix_caching=False)
    assert answers(driver, golden.prompts, golden.sources) == golden.alone
    assert driver.stats.preemptions, "the pool was meant to be too small"


def refusal(golden: Golden, edit: Edit) -> str:
    """Return the loader's error message for the edited checkpoint."""
    copy = golden.folder / "edited"
    shutil.copytree(golden.folder, copy, ignore=shutil.ignore_patterns("edited"))
    edit_checkpoint(copy, edit)
    with pytest.raises(ConfigError) as caught:
        load(copy)
    shutil.rmtree(copy)
    return str(caught.value)


def bfloat16(golden: Golden) -> None:
    """In bfloat16, the default on a CPU, our error is at most 1.5 times that of the reference.

    The two round at different places. Without a transformers reference, FEW_BITS is the limit.
    """
    limit = FEW_BITS * float(golden.logits.norm(dim=-1).median())
    if isinstance(golden.reference, torch.nn.Module):
        rounded = copy.deepcopy(golden.reference).bfloat16()
        with torch.inference_mode():
            limit = 1.5 * _error(golden, rounded(**golden.inputs(-1)).logits[0])
    for backend in ("torch", "numba") if takes_numba(golden) else ("torch",):
        runner = load(golden.folder, dtype="bfloat16", attention_backend=backend)
        for size in (None, 1):
            assert _error(golden, last_logits(golden, runner, size)) < limit, (backend, size)


def _error(golden: Golden, logits: torch.Tensor) -> float:
    """Return the median error of a token's logits, as a norm."""
    return float((logits.float() - golden.logits).norm(dim=-1).median())


def numba(golden: Golden) -> None:
    """Numba's CPU kernels match, or are refused at start with the reason."""
    if not takes_numba(golden):
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


def takes_numba(golden: Golden) -> bool:
    """Whether Numba's attention supports the model: no cross layers."""
    return all(spec.kind != "cross" for spec in kv_specs(golden.runner.model))


def accounts_for_tensors(golden: Golden) -> None:
    """A missing tensor, or an extra one, is an error that names it. One of each kind is tried."""
    names = sorted(load_file(golden.folder / "model.safetensors"))
    kinds = {re.sub(r"\d+", "", name): name for name in names}  # those of the last layer
    for name in names if is_thorough() else kinds.values():
        assert name in refusal(golden, lambda config, tensors, name=name: tensors.pop(name))
    surplus = {"model.surplus": torch.ones(1)}
    assert "model.surplus" in refusal(golden, lambda config, tensors: tensors.update(surplus))


def difference(golden: Golden, edit: Edit) -> float:
    """Return the largest error of the longest prompt's logits with the edited checkpoint."""
    copy = golden.folder / "edited"
    shutil.copytree(golden.folder, copy, ignore=shutil.ignore_patterns("edited"))
    edit_checkpoint(copy, edit)
    logits = last_logits(golden, load(copy))
    shutil.rmtree(copy)
    return float((logits - golden.logits).abs().max())


def setting(key: str, value: Any) -> Edit:
    """Return an edit that sets a key of config.json; None removes the key."""

    def edit(config: dict[str, Any], tensors: Tensors) -> None:
        config[key] = value
        if value is None:
            del config[key]

    return edit


def zeroing(part: str) -> Edit:
    """Return an edit that zeroes every tensor with `part` in its name."""

    def edit(config: dict[str, Any], tensors: Tensors) -> None:
        chosen = [name for name in tensors if part in name]
        assert chosen, f"no tensor is called {part}"
        for name in chosen:
            tensors[name].zero_()

    return edit


def features_matter(golden: Golden) -> None:
    """Removing a feature under test changes the logits, so the case can fail."""
    each_feature_matters(golden.case, lambda edit: difference(golden, edit), VISIBLE)


def each_feature_matters(case: Any, difference: Callable[[Edit], float], visible: float) -> None:
    """Assert that removing any feature of the case gives a `difference` above `visible`.

    `difference` returns the largest error against the reference for an edited checkpoint.
    """
    for key, value in case.without.items():
        assert difference(setting(key, value)) > visible, f"{key} changes nothing"
    for part in case.zeroed:
        assert difference(zeroing(part)) > visible, f"{part} changes nothing"
    for path, stand_in in case.replaced.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(path, stand_in)
            assert difference(lambda config, tensors: None) > visible, f"{path} changes nothing"


def unnormalised(self: RotaryAttention, *args: Any) -> torch.Tensor:
    """Stand-in for RotaryAttention.forward without the norms of queries and keys."""
    self.q_norm = self.k_norm = None
    return _rotary_attention(self, *args)


_rotary_attention = RotaryAttention.forward


def window_is_exact(golden: Golden) -> None:
    """A window longer or shorter by one key changes the logits visibly."""
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


# Each model proves these in each run. The rest is slow: a model mostly consists of parts that
# other models test.
FEW = (full_prefill, chunked_prefill, greedy, prefix_hit, accounts_for_tensors)
# The quick run repeats answers in other ways for the last case of a model only. For the others it
# compares the logits of whole prompts and of chunks.
OF_LAST_CASE = (captured, bfloat16, preempted, greedy, prefix_hit)


def golden_tests(
    cases: Sequence[Case],
    equalities: Sequence[Equality] = EQUALITIES,
    quick: Sequence[Equality] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test(golden, equality) for every pair; add features_matter if the case lists any.

    Equalities that are not `quick` run in `make test-slow`. By default `quick` has FEW of
    EQUALITIES, and all others.
    """
    if quick is None:
        quick = [each for each in equalities if each in FEW or each not in EQUALITIES]
    return every_pair("golden", cases, equalities, features_matter, quick)


def every_pair(
    fixture: str,
    cases: Sequence[Any],
    equalities: Sequence[Callable[[Any], None]],
    features_matter: Callable[[Any], None],
    quick: Sequence[Callable[[Any], None]] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    quick = [*(equalities if quick is None else quick), features_matter]
    pairs = []
    with_features = [case for case in cases if case.without or case.zeroed or case.replaced]
    for case in cases:
        pairs += [(case, equality) for equality in equalities]
        if case in with_features:
            pairs.append((case, features_matter))
    parameters = []
    for case, equality in pairs:
        is_slow = equality not in quick
        if equality in OF_LAST_CASE:
            is_slow |= case is not cases[-1]
        if equality is features_matter:  # it guards the test: the product can hardly change it
            is_slow |= case is not with_features[-1]
        marks = [pytest.mark.slow] if is_slow else []
        name = f"{case.name}-{equality.__name__}"
        parameters.append(pytest.param(case, equality, id=name, marks=marks))
    return pytest.mark.parametrize((fixture, "equality"), parameters, indirect=[fixture])
