"""Heads and layers that are switched off, against the same in transformers by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.protocol.generate import Ablation
from engine.protocol.outputs import TokenOutput
from tests.engine.inspect.test_lens import CASES
from tests.engine.inspect.test_lens import DECODERS as OF_LENS
from tests.support.driver import EAGER, MODES, Driver, each, tiny_llama
from tests.support.golden import Case, Golden
from tests.support.lens import run_lens

pytestmark = pytest.mark.usefixtures("one_thread")
LAYERS, HEADS, SIZE = 2, 4, 8
HEAD = Ablation(heads=((1, 2),))
ALL_HEADS = Ablation(heads=tuple((0, head) for head in range(HEADS)))
LAYER = Ablation(layers=(0,))
BOTH = Ablation(heads=((0, 1), (0, 3)), layers=(1,))
ABLATIONS = {"head": HEAD, "all-heads": ALL_HEADS, "layer": LAYER, "both": BOTH}
PROMPT = [7, 301, 22, 95, 430, 8, 77, 5, 301, 22, 95]
# Without Marian: its norms follow its sublayers, so a layer that adds nothing still norms.
DECODERS = sorted(set(OF_LENS) - {"marian"})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("ablated") / "llama")


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM.from_pretrained(model).eval()


@pytest.fixture(scope="module")
def goldens(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Callable[[Case], Golden]:
    pytest.importorskip("transformers")
    return cache(lambda case: Golden(case, tmp_path_factory.mktemp(case.name)))


def by_hand(reference: Any, ablation: Ablation, tokens: list[int]) -> torch.Tensor:
    """The log-probabilities [V] behind `tokens` of transformers' Llama with hooks."""
    handles = []
    layers = reference.model.layers

    def without(heads: list[int]) -> Callable[..., Any]:
        def hook(module: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            parts = inputs[0].clone().unflatten(-1, (HEADS, SIZE))
            parts[..., heads, :] = 0
            return (parts.flatten(-2),)

        return hook

    for layer in range(LAYERS):
        heads = [head for at, head in ablation.heads if at == layer]
        output = layers[layer].self_attn.o_proj
        handles.append(output.register_forward_pre_hook(without(heads)))
        if layer in ablation.layers:
            for part in (output, layers[layer].mlp.down_proj):
                handles.append(part.register_forward_hook(lambda *given: given[2] * 0))
    with torch.inference_mode():
        logits = reference(torch.tensor([tokens])).logits[0, -1]
    for handle in handles:
        handle.remove()
    return torch.log_softmax(logits.float(), -1)


@pytest.mark.variants(6)
@pytest.mark.parametrize("mode", each(MODES))
@pytest.mark.parametrize("name", ABLATIONS)
def test_ablation_equals_transformers_with_hooks(
    model: Path, reference: Any, name: str, mode: dict[str, Any]
) -> None:
    driver = Driver(model, **mode)
    plain = driver.submit(PROMPT, 6, logprobs=0)
    ablated = driver.submit(PROMPT, 6, logprobs=0, ablation=ABLATIONS[name])
    driver.run()
    for request_id, ablation in ((plain, Ablation()), (ablated, ABLATIONS[name])):
        tokens = list(PROMPT)
        pairs = zip(driver.tokens(request_id), driver.logprobs(request_id), strict=True)
        for token, logprob in pairs:
            expected = by_hand(reference, ablation, tokens)
            assert logprob == pytest.approx(float(expected[token]), abs=2e-4)
            assert token == int(expected.argmax())
            tokens.append(token)
    assert driver.logprobs(plain) != driver.logprobs(ablated)


def outputs(driver: Driver, request_id: int) -> list[TokenOutput]:
    return [
        TokenOutput(0, found.token, found.finish, found.logprobs)
        for found in driver.outputs[request_id]
    ]


@pytest.mark.parametrize("mode", each(MODES | {"chunked": {"max_num_batched_tokens": 16}}))
def test_others_of_an_ablated_request_keep_every_bit(model: Path, mode: dict[str, Any]) -> None:
    draw = random.Random(3)
    prompts = [[draw.randrange(600) for _ in range(size)] for size in (40, 3, 17, 26)]
    found = []
    for ablation in (None, BOTH):
        driver = Driver(model, enable_prefix_caching=False, **mode)
        others = [
            driver.submit(prompt, 12, temperature=0.9, seed=index, logprobs=4)
            for index, prompt in enumerate(prompts)
        ]
        driver.turn(2)
        driver.submit(prompts[2], 8, ablation=ablation)  # it comes and goes among the others
        driver.run()
        found.append([outputs(driver, request_id) for request_id in others])
    assert found[0] == found[1]
    assert not driver.runner.replacements


@pytest.mark.parametrize("mode", each(EAGER))
def test_same_dice_without_ablation_draw_the_same_tokens(model: Path, mode: dict[str, Any]) -> None:
    driver = Driver(model, **mode)
    ids = [
        driver.submit(PROMPT, 12, temperature=1.0, seed=5, ablation=ablation)
        for ablation in (None, Ablation(), BOTH, BOTH)
    ]
    driver.run()
    plain, empty, ablated, again = [driver.tokens(one) for one in ids]
    assert plain == empty
    assert ablated == again
    assert plain != ablated


def test_ablated_requests_share_blocks_only_with_their_kind(model: Path) -> None:
    driver = Driver(model, block_size=16)
    prompt = list(range(50))
    order = (None, HEAD, LAYER, None, HEAD, Ablation(heads=((1, 2), (1, 2))))
    cached, answers = [], []
    for ablation in order:
        request_id = driver.submit(prompt, 4, logprobs=0, ablation=ablation)
        driver.run()
        cached.append(driver.cached_tokens(request_id))
        answers.append(driver.logprobs(request_id))
    assert cached[:3] == [0, 0, 0]
    assert all(count >= 48 for count in cached[3:])
    assert answers[3] == pytest.approx(answers[0], abs=1e-4)
    assert answers[4] == pytest.approx(answers[1], abs=1e-4)
    assert answers[5] == pytest.approx(answers[1], abs=1e-4)


def test_preempted_ablated_request_goes_on_ablated(model: Path) -> None:
    alone = Driver(model, block_size=16)
    wanted = alone.submit(PROMPT, 40, temperature=1.0, seed=1, ablation=BOTH)
    alone.run()
    driver = Driver(model, block_size=16, num_gpu_blocks_override=8, max_model_len=64)
    ids = [
        driver.submit(PROMPT, 40, temperature=1.0, seed=1, priority=1, ablation=BOTH),
        driver.submit(PROMPT[::-1], 40, temperature=1.0, seed=2),
        driver.submit(PROMPT[::2], 40, temperature=1.0, seed=3),
    ]
    driver.run()
    assert driver.stats.preemptions
    assert driver.tokens(ids[0]) == alone.tokens(wanted)


def test_ablated_request_has_no_drafts(model: Path) -> None:
    driver = Driver(model, speculation="ngram", block_size=16)
    drafted = []
    for ablation in (ALL_HEADS, ALL_HEADS, None, None):  # the second time, an answer is known
        driver.submit(PROMPT, 20, ablation=ablation)
        driver.run()
        drafted.append(driver.stats.drafted)
    assert drafted[:2] == [0, 0]
    assert drafted[3] > 0


def test_aborted_ablated_request_leaves_nothing(model: Path) -> None:
    driver = Driver(model)
    request_id = driver.submit(PROMPT, 30, ablation=LAYER)
    driver.turn(3)
    assert driver.runner.replacements
    driver.abort(request_id)
    driver.run()
    assert not driver.runner.replacements
    norms = [layer for layer in driver.runner.model.modules() if "add" in vars(layer)]  # type: ignore[attr-defined]
    assert not norms


def test_layers_of_a_model_with_states_are_switched_off_one_by_one(
    goldens: Callable[[Any], Golden],
) -> None:
    """Recurrent layers are layers, too: they have no heads."""
    golden = goldens(CASES["lfm2"])
    driver, prompt, layers = Driver(golden.folder), golden.prompts[1], golden.reference.model.layers
    assert driver.core.facts.ablatable_heads == (0, 0, 6, 0, 6)
    ids = [
        driver.submit(prompt, 1, logprobs=0, ablation=Ablation(layers=(layer,)))
        for layer in range(len(layers))
    ]
    driver.run()
    for layer, request_id in zip(layers, ids, strict=True):
        handle = layer.register_forward_hook(lambda *given: given[1][0])
        with torch.inference_mode():
            expected = golden.reference(**golden.inputs(1)).logits[0, -1].log_softmax(-1)
        handle.remove()
        assert driver.tokens(request_id) == [int(expected.argmax())]
        assert driver.logprobs(request_id) == pytest.approx([float(expected.max())], abs=2e-4)


@pytest.mark.variants(16)
@pytest.mark.parametrize("name", DECODERS)
def test_model_without_layers_predicts_from_its_embedding(
    goldens: Callable[[Any], Golden], name: str
) -> None:
    """That is what the logit lens shows for layer 0."""
    golden = goldens(CASES[name])
    driver = Driver(golden.folder)
    layers = tuple(range(len(driver.core.facts.ablatable_heads)))
    source = golden.prompts[0] if driver.runner.kind == "encoder-decoder" else None
    tokens = golden.prompts[0] if source is None else [driver.core.facts.start_token or 0]
    lens = run_lens(driver.runner, tokens, source=source or [], positions=(len(tokens) - 1,), top=4)
    request_id = driver.submit(
        list(tokens), 1, logprobs=0, source=source, ablation=Ablation(layers=layers)
    )
    driver.run()
    first = next(found for found in lens.logit_lens if found.layer == 0)
    token, probability = first.top[0]
    assert driver.tokens(request_id) == [token]
    assert torch.tensor(driver.logprobs(request_id)).exp().item() == pytest.approx(
        probability, rel=1e-3
    )


@pytest.mark.parametrize("name", ["gemma3", "gemma4-shared"])
def test_model_without_its_last_layer_predicts_from_the_stream_before_it(
    goldens: Callable[[Any], Golden], name: str
) -> None:
    """The layer is found, too, if it reads the KV of an earlier one."""
    golden = goldens(CASES[name])
    driver = Driver(golden.folder)
    last = len(driver.core.facts.ablatable_heads) - 1
    tokens = golden.prompts[-1]
    lens = run_lens(driver.runner, tokens, positions=(len(tokens) - 1,), top=4)
    ablation = Ablation(layers=(last,))
    request_id = driver.submit(list(tokens), 1, logprobs=0, ablation=ablation)
    driver.run()
    before = next(found for found in lens.logit_lens if found.layer == last)
    token, probability = before.top[0]
    assert driver.tokens(request_id) == [token]
    found = torch.tensor(driver.logprobs(request_id)).exp().item()
    assert found == pytest.approx(probability, rel=1e-3)
