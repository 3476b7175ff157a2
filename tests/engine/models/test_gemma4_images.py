"""Gemma 4 with images against transformers: causal, or both ways in sliding layers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.image_config import missing_tower
from engine.errors import ConfigError
from engine.models.gemma4 import SeeingGemma4
from tests.engine.models.test_gemma4 import FULL, KEYS_AS_VALUES, SHARED, SLIDING, SMALL
from tests.support.gemma4_images import BUDGET, PATCH, POOL, PROCESSOR, shown, vision_inputs
from tests.support.golden import Case, Golden, Tensors, full_prefill, of_transformers, refusal
from tests.support.seeing import Shown, check_images, prompt_with

pytestmark = pytest.mark.usefixtures("one_thread")
IMAGE_TOKEN, PAD, ANSWER = 210, 3, 40
VISION = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "patch_size": PATCH,
    "pooling_kernel_size": POOL,
    "position_embedding_size": BUDGET * POOL,
}
AUDIO = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
AUDIO |= {"subsampling_conv_channels": [4, 4], "output_proj_dims": 8}


def config(vision: dict[str, Any] | None = None, **text: Any) -> Any:
    from transformers import Gemma4Config

    return Gemma4Config(
        text_config=SMALL | text,
        vision_config=VISION | (vision or {}),
        audio_config=AUDIO,
        image_token_id=IMAGE_TOKEN,
        tie_word_embeddings=False,
        vocab_size=SMALL["vocab_size"],  # read by the golden tests alone
    )


def reference(config: Any, folder: Path) -> Any:
    """Return transformers' model, with a padding token, which has inputs per layer of its own."""

    def prepare(model: Any) -> None:
        model.config.get_text_config().pad_token_id = PAD
        for weight in model.model.vision_tower.parameters():
            if weight.dim() > 1:
                weight.data.mul_(0.25)  # so that rounding is less than the tolerance

    return of_transformers(config, folder, prepare=prepare)


def old_names(config: dict[str, Any], tensors: Tensors) -> None:
    """Rename tensors to other prefixes."""
    for name in list(tensors):
        renamed = name.removeprefix("model.").replace("language_model.", "language_model.model.")
        tensors[renamed] = tensors.pop(name)


# The last two layers read the KV of the first two.
READERS = SHARED | {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2}
WHOLE = {"use_bidirectional_attention": "vision"}
CAUSAL = Case(
    "causal",
    lambda: config({"use_clipped_linears": True}, **READERS),
    reference=reference,
    edit=old_names,
)
# An image is longer than the window, or shorter.
SHORT = Case(
    "short-window",
    lambda: config({"standardize": True}, sliding_window=5, **KEYS_AS_VALUES, **WHOLE),
    reference=reference,
)
LONG = Case(
    "long-window", lambda: config(sliding_window=14, **READERS, **WHOLE), reference=reference
)
SEES = [CAUSAL, SHORT, LONG]
STORIES: list[list[Shown]] = [
    [],
    [shown(2, 5, 0)],
    [shown(2, 5, 0), shown(3, 4, 1), shown(1, 1, 2)],
    [shown(2, 5, 4)],  # of the same size as the second, with other pixels
    [shown(2, 5, 0), shown(3, 4, 1), shown(1, 12, 3)],  # the first block ends inside an image
]
every_case = pytest.mark.parametrize("golden", SEES, indirect=True, ids=lambda case: case.name)


@pytest.mark.parametrize("backend", ["torch", "numba"])
@every_case
def test_gemma4_with_images_matches_transformers(golden: Golden, backend: str) -> None:
    check_images(
        golden,
        STORIES[:3],
        IMAGE_TOKEN,
        vision_inputs,
        types=True,
        processor=PROCESSOR,
        attention_backend=backend,
    )


def greedy_reference(
    golden: Golden, images: Sequence[Shown], prompt: list[int], answer: list[int]
) -> list[int]:
    """Return the reference's likeliest tokens behind a prompt and each part of its answer."""
    assert IMAGE_TOKEN not in answer
    tokens = torch.tensor([[*prompt, *answer[:-1]]])
    inputs = vision_inputs(images) if images else {}
    types = (tokens == IMAGE_TOKEN).int()
    with torch.inference_mode():
        logits = golden.reference(tokens, mm_token_type_ids=types, **inputs).logits[0]
    found: list[int] = logits[len(prompt) - 1 :].argmax(-1).tolist()
    return found


MODES: list[dict[str, Any]] = [{"depth": 0}, {"depth": 1, "late": True}]
QUICK = [(CAUSAL, MODES[0]), (LONG, MODES[1])]


@pytest.mark.parametrize(
    ("golden", "mode"),
    [
        pytest.param(case, mode, marks=[] if (case, mode) in QUICK else pytest.mark.slow)
        for case in SEES
        for mode in MODES
    ],
    indirect=["golden"],
    ids=lambda each: each.name if isinstance(each, Case) else str(each),
)
def test_gemma4_answers_about_images_survive_chunks_hits_and_preemptions(
    golden: Golden, mode: dict[str, Any]
) -> None:
    """A step's budget is less than an image, and cached prefixes end inside images."""
    (golden.folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    driver = golden.driver(
        max_num_batched_tokens=5, num_gpu_blocks_override=40, block_size=16, **mode
    )
    whole = golden.case is not CAUSAL
    assert driver.loaded.facts.image_tokens == BUDGET * whole
    prompts = [prompt_with(images, IMAGE_TOKEN) for images in STORIES]
    scheduler, inside = driver.core.scheduler, 0
    for _ in range(2):
        ids = []
        for images, (prompt, starts) in zip(STORIES, prompts, strict=True):
            places = [each.image(first) for each, first in zip(images, starts, strict=True)]
            ids.append(driver.submit(prompt, ANSWER, images=places))
        for _ in range(3):
            driver.turn(7)
            scheduler._preempt(scheduler.running[-1])
        driver.run()
        for images, request, (prompt, starts) in zip(STORIES, ids, prompts, strict=True):
            answer = driver.tokens(request)
            assert len(answer) == ANSWER
            assert answer == greedy_reference(golden, images, prompt, answer)
            cached = driver.admissions[request].cached_tokens
            runs = zip(starts, images, strict=True)
            inside += any(first < cached < first + each.num_tokens for first, each in runs)
    assert inside > 0
    assert driver.stats.gauges["images_encoded"] == 5


def blind(config: dict[str, Any], tensors: Tensors) -> None:
    """Remove the tensors of the tower."""
    for name in [name for name in tensors if "vision" in name]:
        del tensors[name]


@pytest.mark.parametrize(
    "golden",
    [Case("blind", lambda: config(**READERS), reference=reference, edit=blind, lengths=(33,))],
    indirect=True,
    ids=["blind"],
)
def test_gemma4_without_a_tower_is_a_text_model(golden: Golden) -> None:
    full_prefill(golden)
    assert not isinstance(golden.runner.model, SeeingGemma4)
    model = json.loads((golden.folder / "config.json").read_text())
    assert missing_tower(model, golden.folder) == "model.safetensors has no tensors of vision_tower"
    del model["vision_config"]
    assert missing_tower(model, golden.folder) == "config.json has no vision_config"


@pytest.mark.parametrize("golden", [LONG], indirect=True, ids=["seeing"])
def test_gemma4_accounts_for_tensors_of_both_halves(golden: Golden) -> None:
    for missing in (
        "model.language_model.layers.3.layer_scalar",
        "model.vision_tower.patch_embedder.position_embedding_table",
        "model.embed_vision.embedding_projection.weight",
        "lm_head.weight",
    ):
        assert missing in refusal(golden, lambda config, tensors, m=missing: tensors.pop(m))
    for surplus in ("model.language_model.vision_tower.weight", "model.vision_tower.talker"):
        extra = {surplus: torch.ones(1)}
        assert surplus in refusal(golden, lambda config, tensors, e=extra: tensors.update(e))


@pytest.mark.parametrize("golden", [CAUSAL], indirect=True, ids=["clipped"])
def test_gemma4_limits_that_are_nan_are_refused(
    golden: Golden,
) -> None:
    name = "vision_tower.encoder.layers.0.mlp.up_proj.input_max"

    def spoil(config: dict[str, Any], tensors: Tensors) -> None:
        tensors[name] = torch.tensor(float("nan"))

    assert f"{name} in" in refusal(golden, spoil)


def test_gemma4_positions_below_the_longest_strip_are_refused() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match="position_embedding_size 36; a strip of 280 embeddings"):
        SeeingGemma4.read_config(config().to_dict())
    with pytest.raises(ConfigError, match="pad_token_id = 211"):
        SeeingGemma4.read_config(
            config(pad_token_id=211).to_dict() | {"image_processor": PROCESSOR}
        )
