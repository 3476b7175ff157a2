"""The tensors of an image encoder's GGUF sidecar, in the form of a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from engine.checkpoint.gguf.encoder_names import GEMMA3_PROJECTION, encoder_names
from engine.checkpoint.gguf.header import Header, StoredTensor, read_header
from engine.checkpoint.gguf.image_encoder import (
    ENCODERS,
    FIRST_FRAME,
    HIDDEN,
    SECOND_FRAME,
    count_of,
    deep_layers,
    projector_of,
)
from engine.checkpoint.gguf.tensors import GGUFTensor, StackedTensor, read_tensors
from engine.errors import ConfigError

QKV, APART = "attn_qkv", ("attn_q", "attn_k", "attn_v")
UP, DOWN = ".ffn_up.", ".ffn_down."
SOFT_NORM = "mm.soft_emb_norm.weight"  # the converter adds 1


def seeing_tensors(files: Sequence[Path], encoder: Path) -> dict[str, GGUFTensor | StackedTensor]:
    """Return the tensors of a model that sees by name, without their numbers.

    `files` are those of the language model, and `encoder` is the sidecar. Raises ConfigError if one
    is damaged, or holds a tensor that is not computed.
    """
    header = read_header(encoder)
    prefix = ENCODERS[projector_of(header.settings)].prefix
    found: dict[str, GGUFTensor | StackedTensor] = {}
    for name, tensor in read_tensors(files).items():
        is_of_model = name.startswith("model.")
        found[prefix + name.removeprefix("model.") if is_of_model else name] = tensor
    return found | encoder_tensors(header)


def encoder_tensors(header: Header) -> dict[str, GGUFTensor | StackedTensor]:
    """Return the tensors by their names in a checkpoint, without their numbers.

    Raises ConfigError for one that the encoder does not have.
    """
    projector, settings = projector_of(header.settings), header.settings
    names = encoder_names(projector, count_of(settings, "block_count"), deep_layers(settings))
    tensors = _in_order(header.tensors, count_of(settings, HIDDEN))
    found: dict[str, GGUFTensor | StackedTensor] = {}
    for name, stored in tensors.items():
        if name == FIRST_FRAME and SECOND_FRAME in tensors:
            frames = [stored, tensors[SECOND_FRAME]]
            found[names["v.patch_embd"] + ".weight"] = _in_frames(frames)
            continue
        if name == SECOND_FRAME:
            continue
        base, _, ending = name.rpartition(".")
        joined = [base.replace(APART[0], part) for part in APART]
        fused = base.replace(APART[0], QKV)
        if fused in names and base == joined[0] != fused:
            rows = tuple(_whole(_tensor(tensors, f"{part}.{ending}", stored)) for part in joined)
            found[f"{names[fused]}.{ending}"] = StackedTensor(rows, (-1, *stored.shape[1:]))
            continue
        if base.rpartition(".")[2] in APART[1:] and base not in names:
            continue  # stacked behind the queries
        if base not in names:
            raise ConfigError(
                f"{stored.file} holds the tensor {name!r:.99}, which Penstock does not compute for "
                f"image encoders with the projector {projector}."
            )
        separator = "_" if base == GEMMA3_PROJECTION else "."
        found[f"{names[base]}{separator}{ending}"] = _whole(stored, added=name == SOFT_NORM)
    return found


def _in_frames(frames: Sequence[StoredTensor]) -> StackedTensor:
    """Return the kernel [outputs, channels, frames, height, width]; the file has it by frame."""
    parts = []
    for frame in frames:
        outputs, channels, *sides = frame.shape
        parts.append(_whole(replace(frame, shape=(outputs, channels, 1, *sides))))
    return StackedTensor(tuple(parts), (outputs, channels, len(frames), *sides), axis=2)


def _whole(stored: StoredTensor, *, added: bool = False) -> GGUFTensor:
    """Return a tensor in the form of a checkpoint. Towers multiply no codes."""
    amount = 1.0 if added else 0.0
    return GGUFTensor(stored, None, amount, transposed=False, keeps_codes=False)


def _tensor(
    tensors: Mapping[str, StoredTensor], name: str, neighbour: StoredTensor
) -> StoredTensor:
    if name not in tensors:
        raise ConfigError(f"{neighbour.file} lacks the tensor {name}.")
    return tensors[name]


def _in_order(tensors: Mapping[str, StoredTensor], hidden: int) -> dict[str, StoredTensor]:
    """Return the tensors with the two layers of each MLP under their names.

    Old converters exchanged these names. llama.cpp finds out by the shapes, too.
    """
    up = tensors.get(f"v.blk.0{UP}weight")
    if up is None or up.shape[0] != hidden or up.shape[-1] == hidden:
        return dict(tensors)
    found = {}
    for name, stored in tensors.items():
        other = DOWN if UP in name else UP
        found[name.replace(UP, other) if UP in name else name.replace(DOWN, other)] = stored
    return found
