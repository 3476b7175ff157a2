"""The lens of every architecture against the inside of its reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.demo
from engine.checkpoint.image_config import SEEING
from engine.inspect import lens_plan
from engine.models.registry import ARCHITECTURES
from engine.protocol.lens import LensResult, Prediction
from tests.engine.models import (
    test_arcee,
    test_bert,
    test_cohere,
    test_cohere2,
    test_deepseek_v2,
    test_deepseek_v3,
    test_distilbert,
    test_embedding_gemma,
    test_exaone4,
    test_gemma,
    test_gemma2,
    test_gemma3,
    test_gemma4,
    test_glm,
    test_glm4,
    test_gpt2,
    test_gpt_neox,
    test_gpt_oss,
    test_granite,
    test_granite_hybrid,
    test_granite_moe,
    test_gte,
    test_jina_v3,
    test_lfm2,
    test_lfm2_moe,
    test_llama,
    test_marian,
    test_ministral3,
    test_mistral,
    test_mixtral,
    test_modernbert,
    test_mpnet,
    test_nanochat,
    test_nomic_bert,
    test_olmo2,
    test_olmo3,
    test_olmoe,
    test_phi3,
    test_qwen2,
    test_qwen2_moe,
    test_qwen3,
    test_qwen3_5,
    test_qwen3_5_moe,
    test_qwen3_moe,
    test_qwen3_next,
    test_roberta,
    test_roformer,
    test_seed_oss,
    test_smollm3,
    test_stablelm,
    test_starcoder2,
    test_t5,
)
from tests.support.driver import Driver
from tests.support.encoders import Encoder, EncoderCase
from tests.support.golden import Case, Golden
from tests.support.lens import Inside, inside_of_naive, inside_of_transformers, run_lens, unpacked
from tests.support.naive_nanochat import Naive

pytestmark = pytest.mark.usefixtures("one_thread")
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
CASES = {
    "gpt2": test_gpt2.CASES[0],
    "llama": test_llama.CASES[0],
    "llama-tied": test_llama.CASES[1],
    "mistral": test_mistral.WINDOWED,
    "ministral3": test_ministral3.CASE,
    "qwen2": test_qwen2.CASE,
    "qwen3": test_qwen3.SLIDES,
    "gemma": test_gemma.CASE,
    "gemma2": test_gemma2.CASE,
    "gemma3": test_gemma3.CASE,
    "exaone4": test_exaone4.CASE,
    "glm": test_glm.CASE,
    "glm4": test_glm4.CASE,
    "gemma4": replace(test_gemma4.CASE, lengths=(33,)),
    "gemma4-shared": replace(test_gemma4.E2B, lengths=(33,)),
    "granite": test_granite.CASE,
    "cohere": test_cohere.CASE,
    "cohere2": test_cohere2.CASE,
    "granite_hybrid": test_granite_hybrid.CASE,
    "lfm2": test_lfm2.CASE,
    "lfm2_moe": test_lfm2_moe.CASE,
    "olmo2": test_olmo2.CASE,
    "olmo3": test_olmo3.CASE,
    "mixtral": test_mixtral.CASE,
    "qwen2_moe": test_qwen2_moe.CASE,
    "qwen3_moe": test_qwen3_moe.CASE,
    "qwen3_next": test_qwen3_next.CASE,
    "qwen3_5": test_qwen3_5.CASE,
    "qwen3_5_moe": test_qwen3_5_moe.CASE,
    "gpt_oss": test_gpt_oss.CASE,
    "deepseek_v2": test_deepseek_v2.LITE,
    "deepseek_v3": test_deepseek_v3.CASE,
    "smollm3": test_smollm3.CASE,
    "seed_oss": test_seed_oss.CASE,
    "arcee": test_arcee.CASE,
    "olmoe": test_olmoe.CASE,
    "granite_moe": test_granite_moe.CASE,
    "stablelm": test_stablelm.SEQUENTIAL,
    "stablelm-parallel": test_stablelm.CASE,
    "starcoder2": test_starcoder2.CASE,
    "phi3": test_phi3.CASE,
    "gpt-neox": test_gpt_neox.CASE,
    "gpt-neox-sequential": test_gpt_neox.SEQUENTIAL,
    "nanochat-first": test_nanochat.CASES[0],
    "nanochat-newest": test_nanochat.CASES[2],
    "t5": test_t5.CASES[0],
    # Shorter: without a scale, its scores are so large that fp32 rounds weights by 1e-4.
    "t5-gated": replace(test_t5.CASES[1], lengths=(33,)),
    "marian": test_marian.CASES[0],
    "bert": EncoderCase("bert", test_bert.config),
    "roformer": EncoderCase("roformer", test_roformer.config),
    "roberta": test_roberta.CASE,
    "distilbert": test_distilbert.CASE,
    "mpnet": test_mpnet.CASE,
    "modernbert": test_modernbert.CASE,
    "nomic_bert": test_nomic_bert.CASE,
    "gte": test_gte.CASE,
    "jina_v3": test_jina_v3.CASE,
    "embedding_gemma": test_embedding_gemma.CASE,
}
DECODERS = [name for name, case in CASES.items() if isinstance(case, Case)]
# A model of each kind of attention, norm and state; the other ones run in the slow suite.
QUICK = {
    *("gpt2", "llama", "gemma3", "gemma4-shared", "gpt_oss", "granite_hybrid", "lfm2"),
    *("qwen3_next", "deepseek_v2", "nanochat-newest", "gpt-neox", "stablelm-parallel"),
    *("t5", "marian", "bert", "modernbert"),
}


class Looked:
    """A case with our lens of its longest text and the inside of its reference."""

    def __init__(self, case: Case | EncoderCase, folder: Any) -> None:
        self.source: list[int] = []
        if isinstance(case, EncoderCase):
            encoder = Encoder(case, folder)
            encoder.reference.set_attn_implementation("eager")
            self.runner, self.tokens = encoder.runner, encoder.texts[-1]
            inputs = {"input_ids": torch.tensor([self.tokens])}
            self.inside = inside_of_transformers(encoder.reference, inputs)
        else:
            golden = Golden(replace(case, lengths=case.lengths[-1:]), folder)
            self.runner, self.tokens = golden.runner, golden.prompts[0]
            self.source, inputs = golden.sources[0], golden.inputs(0)
            self.inside = inside_of(golden.reference, inputs)
        self.positions = tuple(range(0, len(self.tokens), 3))
        self.result = run_lens(
            self.runner, self.tokens, source=self.source, positions=self.positions
        )


def inside_of(reference: Any, inputs: dict[str, torch.Tensor]) -> Inside:
    if isinstance(reference, Naive):
        return inside_of_naive(reference, inputs["input_ids"][0])
    return inside_of_transformers(reference, inputs)


@pytest.fixture(scope="module")
def looks(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Callable[[str], Looked]:
    pytest.importorskip("transformers")
    return cache(lambda name: Looked(CASES[name], tmp_path_factory.mktemp(name)))


@pytest.fixture
def looked(request: pytest.FixtureRequest, looks: Callable[[str], Looked]) -> Looked:
    return looks(request.param)


def each(names: Iterable[str]) -> pytest.MarkDecorator:
    cases = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in names]
    return pytest.mark.parametrize("looked", cases, indirect=True)


every = each(CASES)
every_decoder = each(DECODERS)


def test_cases_cover_every_architecture() -> None:
    tests = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    tests.add("decoder_classifiers")  # their layers are those of decoders
    tests.add("logit_score")
    for name, (_, module, _) in ARCHITECTURES.items():
        if name in SEEING:  # their layers are those of the text model that they extend
            continue
        assert module.removeprefix("engine.models.") in tests, module


def floats(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.float)


@every
@pytest.mark.variants(5)
def test_lens_attention_is_the_references(looked: Looked) -> None:
    for stack, expected in looked.inside.attention.items():
        layers = [layer for layer in looked.result.attention if layer.stack == stack]
        every_layer = range(len(expected) + len(looked.inside.recurrent))
        numbers = [number for number in every_layer if number not in looked.inside.recurrent]
        assert [layer.layer for layer in layers] == numbers
        for layer, weights in zip(layers, expected, strict=True):
            torch.testing.assert_close(unpacked(layer), weights, rtol=0, atol=1e-4)
    assert {layer.stack for layer in looked.result.attention} == looked.inside.attention.keys()


@every
def test_lens_norms_are_the_references(looked: Looked) -> None:
    for stack, stream in looked.inside.streams.items():
        norms = [norm for norm in looked.result.norms if norm.stack == stack]
        assert len(norms) == len(stream.norms)
        for norm, (before, after) in zip(norms, stream.norms, strict=True):
            expected = before.square().mean(-1).sqrt()
            torch.testing.assert_close(floats(norm.before), expected, **CLOSE)
            torch.testing.assert_close(floats(norm.after), after.square().mean(-1).sqrt(), **CLOSE)


def share(output: torch.Tensor, stream: torch.Tensor) -> float:
    """The update scale, from standard deviations."""
    return math.sqrt(1 / (1 + (stream.std() / output.std()) ** 2))


@every
def test_lens_update_scales_are_the_references(looked: Looked) -> None:
    for stack, stream in looked.inside.streams.items():
        updates = [update for update in looked.result.updates if update.stack == stack]
        assert len(updates) == len(stream.joins)
        for update, (output, before) in zip(updates, stream.joins, strict=True):
            assert update.scale == pytest.approx(share(output, before), abs=1e-4)
            later = share(output[1:], before[1:])
            assert update.scale_after_first == pytest.approx(later, abs=1e-4)
            by_token = [share(o, s) for o, s in zip(output, before, strict=True)]
            assert floats(update.scales).tolist() == pytest.approx(by_token, abs=1e-4)
        kinds = ["attention", "cross", "mlp", "per-layer input"]
        if stack == "encoder" or not looked.source:
            kinds.remove("cross")
        if not getattr(looked.runner.model, "per_layer", None):
            kinds.remove("per-layer input")
        layers = len(stream.joins) // len(kinds)
        recurrent = ["recurrent", *kinds[1:]]
        expected = [
            (layer, kind)
            for layer in range(layers)
            for kind in (recurrent if layer in looked.inside.recurrent else kinds)
        ]
        assert [(update.layer, update.kind) for update in updates] == expected


def check_prediction(found: Prediction, logits: torch.Tensor, following: int | None) -> None:
    """Compare a prediction with the reference's logits [V]."""
    probabilities = logits.softmax(-1)
    best = probabilities.topk(len(found.top)).values.tolist()
    assert [p for _, p in found.top] == pytest.approx(best, abs=1e-4)
    for token, probability in found.top:
        assert probability == pytest.approx(float(probabilities[token]), abs=1e-4)
    entropy = torch.distributions.Categorical(logits=logits).entropy() / math.log(2)
    assert found.entropy == pytest.approx(float(entropy), abs=5e-4)
    if following is None:
        assert found.actual is None
        return
    assert found.actual is not None
    assert found.actual[0] == pytest.approx(float(probabilities[following]), abs=1e-4)
    likelier = (probabilities > probabilities[following] + 1e-6).sum()
    assert likelier < found.actual[1] <= (probabilities > probabilities[following] - 1e-6).sum()


@every_decoder
def test_lens_predictions_and_logit_lens_are_the_references(looked: Looked) -> None:
    result, tokens = looked.result, looked.tokens
    following = [*tokens[1:], None]
    assert [found.position for found in result.predictions] == list(range(len(tokens)))
    for found in result.predictions:
        check_prediction(found, looked.inside.logits[-1][found.position], following[found.position])
    layers = len(looked.inside.logits)
    places = [(found.layer, found.position) for found in result.logit_lens]
    assert places == [(layer, at) for layer in range(layers) for at in looked.positions]
    for found in result.logit_lens:
        logits = looked.inside.logits[found.layer][found.position]
        check_prediction(found, logits, following[found.position])


@pytest.mark.parametrize("looked", ["bert", "roformer"], indirect=True)
def test_lens_of_an_encoder_has_no_predictions(looked: Looked) -> None:
    assert looked.result.predictions == looked.result.logit_lens == []


@pytest.mark.parametrize("looked", ["gemma2"], indirect=True)
def test_lens_scores_before_the_softcap_give_the_weights(looked: Looked) -> None:
    for layer in looked.result.attention:
        cap = layer.softcap
        assert cap == 3.0
        scores = unpacked(layer, layer.scores)
        back = torch.arange(layer.queries)[:, None] - torch.arange(layer.keys)
        hidden = (back < 0) | (back >= (layer.window or layer.keys))
        capped = (cap * torch.tanh(scores / cap)).masked_fill(hidden, -math.inf)
        torch.testing.assert_close(capped.softmax(-1), unpacked(layer), rtol=0, atol=1e-5)
        assert scores.abs().max() > cap
    assert {layer.window for layer in looked.result.attention} == {20, None}


@pytest.mark.parametrize("looked", ["gpt2", "t5", "gemma", "lfm2"], indirect=True)
def test_lens_changes_no_bit_of_the_cache_and_restores_the_model(looked: Looked) -> None:
    runner = looked.runner
    module: Any = runner.model
    before = [(kv.keys.clone(), kv.values.clone()) for kv in runner.kv.layers]
    kernels = [getattr(layer, "kernels", None) for layer in module.modules()]
    again = run_lens(runner, looked.tokens, source=looked.source, positions=looked.positions)
    assert again == looked.result
    for kv, (keys, values) in zip(runner.kv.layers, before, strict=True):
        assert torch.equal(kv.keys, keys)
        assert torch.equal(kv.values, values)
    assert [getattr(layer, "kernels", None) for layer in module.modules()] == kernels
    for layer in module.modules():
        assert not {"add", "forward"} & vars(layer).keys()


@pytest.mark.parametrize("looked", ["llama", "marian", "bert"], indirect=True)
def test_lens_cosines_are_those_of_the_embeddings(looked: Looked) -> None:
    module: Any = looked.runner.model
    table = (module.encoder_embed if looked.source else module.embed).weight
    ids = [3, 5, 8, 3]
    rows = table[ids].double()
    expected = (rows @ rows.T) / rows.norm(dim=1).outer(rows.norm(dim=1))
    result: LensResult = run_lens(looked.runner, ids, embeddings=True)
    torch.testing.assert_close(floats(result.cosines).view(4, 4), expected.float(), **CLOSE)


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_lens_cosines_of_a_tied_embedding_do_not_need_its_table(backend: str) -> None:
    """A packed head may hold the only copy of the rows (`Table.move_to`), as in the demo model."""
    demo = Path(engine.demo.__file__).parent / "model"
    driver = Driver(demo, dtype="bfloat16", attention_backend=backend, max_model_len=64)
    module: Any = driver.runner.model
    ids = [3, 5, 8, 3]
    rows = module.embed(torch.tensor(ids)).double()
    expected = (rows @ rows.T) / rows.norm(dim=1).outer(rows.norm(dim=1))
    result: LensResult = run_lens(driver.runner, ids, embeddings=True)
    torch.testing.assert_close(floats(result.cosines).view(4, 4), expected.float(), **CLOSE)


def test_lens_without_attention_has_no_weights(looks: Callable[[str], Looked]) -> None:
    looked = looks("llama")
    result = run_lens(looked.runner, looked.tokens, attention=False)
    assert result.attention == []
    assert result.updates == looked.result.updates


@pytest.mark.parametrize("looked", ["gemma2", "mistral", "t5", "bert"], indirect=True)
def test_long_text_is_attended_in_parts(looked: Looked, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores of a text of 8,000 tokens take gigabytes; `penstock compare` has such texts."""
    monkeypatch.setattr(lens_plan, "MOST_SCORES", 7 * 4 * len(looked.tokens))
    parts = run_lens(looked.runner, looked.tokens, source=looked.source, positions=looked.positions)
    assert len(parts.attention) == len(looked.result.attention)
    for part, whole in zip(parts.attention, looked.result.attention, strict=True):
        torch.testing.assert_close(unpacked(part), unpacked(whole), **CLOSE)
        if whole.scores:
            scores = unpacked(part, part.scores), unpacked(whole, whole.scores)
            torch.testing.assert_close(*scores, **CLOSE)
    for part, whole in zip(parts.predictions, looked.result.predictions, strict=True):
        assert part.entropy == pytest.approx(whole.entropy, abs=1e-3)
