"""Golden tests of image encoders: embeddings against `transformers`, with tiny random weights.

A case is a checkpoint that transformers saves, and our tower and connector filled from it. Pictures
are random bytes in the size that the model's image processor gives: what is compared begins with
bytes, so no version of Pillow takes part. The reference's numbers are made as its Pillow backend
does: factor, mean and standard deviation one after the other.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from engine.attention.backend import AttentionBackend
from engine.attention.batch import ForwardBatch
from engine.checkpoint.loader import load_weights
from engine.checkpoint.weight_map import WeightMap
from engine.layers.linear import Linear
from engine.models.vision.block import Units
from engine.ops.kernels import Kernels, use_kernels
from engine.ops.seen_tokens import SeenTokens
from engine.protocol.generate import Image
from engine.scheduling.step import Step
from engine.vision.seen import last_keys
from tests.support.golden import randomise

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
IMAGE_PROCESSOR = {"image_mean": list(MEAN), "image_std": list(STD), "rescale_factor": 1 / 255}
# Of a picture's embeddings, divided by their standard deviation. The reference computes in float64,
# because its own rounding in fp32 is as large as ours.
TOLERANCE = 1e-5
# In bf16 our mean square error may be this many times the reference's.
IN_BF16 = 1.5**2
Picture = torch.Tensor  # uint8 [tiles, height, width, 3]


@dataclass(frozen=True, eq=False)  # compared by identity, as the key of a cache
class VisionCase:
    """One variant of an image encoder.

    `reference` returns the embeddings [n, width] of one picture by a transformers model, from its
    numbers [tiles, 3, height, width]. `encode` returns ours. `sizes` are of pictures.
    """

    name: str
    model: Callable[[], Any]  # a transformers model
    build: Callable[[dict[str, Any], torch.dtype], nn.Module]
    weight_map: Callable[[nn.Module], WeightMap]
    reference: Callable[[Any, torch.Tensor, tuple[int, ...]], torch.Tensor]
    sizes: Sequence[tuple[int, ...]]  # tiles, height, width, and what else the case knows
    encode: Callable[[Any, Picture, tuple[int, ...]], Units] = field(
        default=lambda module, pixels, size: module.encode(pixels, Image(b"", ()))
    )
    gain: float = 0.5


class Vision:
    """The reference model of a case, its checkpoint in `folder`, and our modules."""

    def __init__(self, case: VisionCase, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.reference = case.model().eval().requires_grad_(False)
        with torch.no_grad():
            for parameter in self.reference.parameters():
                parameter.requires_grad_(True)
            randomise(self.reference, 32, case.gain)
        self.reference.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        self.config = config | {"image_processor": IMAGE_PROCESSOR}

    def module(
        self, dtype: torch.dtype = torch.float32, kernels: Kernels = "torch", *, packs: bool = False
    ) -> nn.Module:
        """Return our encoder, filled from the checkpoint as a text model is."""
        with torch.device("meta"):
            module = self.case.build(self.config, dtype)
        use_kernels(module, kernels)

        def pack(layer: nn.Module) -> None:
            if packs and isinstance(layer, Linear):
                layer.prepack()

        load_weights(
            module,
            self.case.weight_map(module),
            self.folder,
            dtype=dtype,
            device=torch.device("cpu"),
            on_filled=pack,
        )
        return module

    def edit(self, change: Callable[[dict[str, torch.Tensor]], None], other: Path) -> Vision:
        """Return the same with changed tensors, in another folder."""
        tensors = load_file(self.folder / "model.safetensors")
        change(tensors)
        other.mkdir(exist_ok=True)
        shutil.copy(self.folder / "config.json", other)
        save_file(tensors, other / "model.safetensors")
        edited = copy.copy(self)
        edited.folder = other
        return edited

    @torch.inference_mode()
    def encode(self, module: nn.Module, pixels: Picture, size: tuple[int, ...]) -> torch.Tensor:
        return whole(self.case.encode(module, pixels, size))

    @torch.inference_mode()
    def expected(
        self, pixels: Picture, size: tuple[int, ...], dtype: torch.dtype = torch.float64
    ) -> torch.Tensor:
        model = copy.deepcopy(self.reference).to(dtype)
        return self.case.reference(model, numbers_of(pixels).to(dtype), size)


def numbers_of(pixels: Picture) -> torch.Tensor:
    """Return [tiles, 3, height, width] fp32, as transformers' Pillow backend makes them."""
    from transformers.image_transforms import normalize, rescale

    channels_first = [tile.permute(2, 0, 1).numpy() for tile in pixels]
    options: Mapping[str, Any] = {"input_data_format": "channels_first"}
    tiles = [
        normalize(rescale(tile, 1 / 255, **options), MEAN, STD, **options)
        for tile in channels_first
    ]
    return torch.from_numpy(np.stack(tiles))


def whole(units: Units) -> torch.Tensor:
    """Return the result of all units of work."""
    while True:
        try:
            next(units)
        except StopIteration as end:
            result: torch.Tensor = end.value
            return result


def picture(size: Sequence[int], seed: int = 0) -> Picture:
    """Return random tiles [tiles, height, width, 3]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (*size[:3], 3)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def shows(
    images: Sequence[Sequence[tuple[int, torch.Tensor]]],
    whole: AttentionBackend | None = None,
) -> Callable[[Step, ForwardBatch], ForwardBatch]:
    """Return the argument `prepare` of `forward` for prompts that show images.

    `images` are those of each prompt: their first token, and their embeddings [n, width]. With the
    backend `whole` the tokens of an image see all of it.
    """

    def prepare(step: Step, batch: ForwardBatch) -> ForwardBatch:
        index: list[int] = []
        rows: list[torch.Tensor] = []
        before = 0
        for part in step.slices:
            for first, embeddings in images[part.row]:
                begin = max(first, part.start)
                end = min(first + len(embeddings), part.start + part.count)
                index += range(before + begin - part.start, before + end - part.start)
                rows.append(embeddings[begin - first : max(end, begin) - first])
            before += part.count
        if not index:
            return batch
        seen = SeenTokens(torch.tensor(index), torch.cat(rows))
        if whole is None:
            return replace(batch, seen=seen)
        runs = [[Image(b"", ((first, len(e)),)) for first, e in each] for each in images]
        ends = np.concatenate([last_keys(part, runs[part.row]) for part in step.slices])
        layout = replace(batch.plan.layout, last_keys=torch.from_numpy(ends))
        return replace(batch, seen=seen, plan=whole.plan(layout))

    return prepare


# ---- the equalities --------------------------------------------------------------------------


def embeddings(vision: Vision) -> None:
    """Each picture's embeddings in fp32 are the reference's, with torch's and Numba's kernels."""
    for kernels in ("torch", "numba"):
        module = vision.module(kernels=kernels)
        for seed, size in enumerate(vision.case.sizes):
            pixels = picture(size, seed)
            found = vision.encode(module, pixels, size)
            exact = vision.expected(pixels, size)
            size_of_one = exact.std()
            torch.testing.assert_close(
                found / size_of_one, exact / size_of_one, rtol=0, atol=TOLERANCE, check_dtype=False
            )


def bfloat16(vision: Vision) -> None:
    """In bf16, with packed weights and Numba's kernels, the error is that of the reference."""
    module = vision.module(torch.bfloat16, "numba", packs=True)
    ours, theirs = 0.0, 0.0
    for seed, size in enumerate(vision.case.sizes):
        pixels = picture(size, seed)
        exact = vision.expected(pixels, size)
        rounded = vision.expected(pixels, size, torch.bfloat16)
        ours += float((vision.encode(module, pixels, size) - exact).square().mean())
        theirs += float((rounded - exact).square().mean())
    assert theirs > 0
    assert ours < IN_BF16 * theirs
