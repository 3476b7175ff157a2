"""Tensors of GGUF files, under the names and in the form of a Hugging Face checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.checkpoint.gguf.architecture import (
    is_transposed,
    joined_names,
    stored_offset,
    tensor_name,
)
from engine.checkpoint.gguf.blocks import FORMS, KEPT, PLAIN, QUANTIZED, regrouped
from engine.checkpoint.gguf.delta import RATES, without_drafter
from engine.checkpoint.gguf.end_tokens import tokens_of
from engine.checkpoint.gguf.fused import GATE_AND_UP, GATE_UP
from engine.checkpoint.gguf.gpt_oss import DOWN, GATE, GPT_OSS, UP
from engine.checkpoint.gguf.header import StoredTensor, read_header
from engine.checkpoint.gguf.orders import row_order, rows_of_rates
from engine.checkpoint.gguf.settings import DELTAS, architecture_of, own_settings
from engine.checkpoint.gguf.shapes import (
    FACTORS,
    STACKED,
    absent_biases,
    all_tensors,
    checked_tensors,
    split_parts,
)
from engine.errors import ConfigError
from engine.ops.quantize import GROUP, Codes, CodesForm, common_form, stacked


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor, and what its converter has done to it."""

    stored: StoredTensor
    order: torch.Tensor | None  # where the checkpoint's rows are in the file; None: the same
    added: float
    transposed: bool
    of_columns: bool = False  # whether `order` is that of the columns
    is_decay: bool = False  # -exp of the checkpoint's numbers
    keeps_codes: bool = True  # False: it is always read as numbers

    @property
    def file(self) -> Path:
        return self.stored.file

    @property
    def kind(self) -> str:
        return self.stored.kind.name

    @property
    def form(self) -> CodesForm | None:
        """How `codes` keeps the tensor; None if it cannot."""
        inputs = self.stored.shape[-1]
        if not self.keeps_codes:
            return None
        if len(self.stored.shape) != 2 or self.transposed or self.added or inputs % GROUP:
            return None
        if self.of_columns and self.order is not None:  # the groups of codes are of other columns
            return None
        return FORMS.get(self.stored.kind.name)

    def codes(self) -> Codes:
        """Return the codes that the file stores, of a tensor with a form.

        Scales and offsets that are products are rounded to fp16. Groups of 16 are rounded to int8.
        """
        outputs, inputs = self.stored.shape
        kind = self.stored.kind.name
        form = FORMS[kind]
        groups = KEPT.get(kind, QUANTIZED[kind])(_blocks(self.stored))
        found = regrouped(groups, form, outputs, inputs)
        return found if self.order is None else found.of_outputs(self.order)

    def read(self) -> torch.Tensor:
        """Return the tensor as a checkpoint has it: in its own dtype, or fp32 if quantised."""
        found = decode(self.stored)
        if self.order is not None:
            found = found[:, self.order] if self.of_columns else found[self.order]
        if self.added:
            found = found.float() - self.added
        if self.is_decay:
            found = (-found.float()).log()
        return found.t() if self.transposed else found


@dataclass(frozen=True, slots=True)
class StackedTensor:
    """Tensors whose rows follow each other in one tensor of the checkpoint.

    Of its `shape`, -1 is as many as there are. With another `axis`, it is not the rows. `order` is
    where the rows are in the parts together; None: one after the other.
    """

    parts: tuple[GGUFTensor, ...]
    shape: tuple[int, ...]
    axis: int = 0
    order: torch.Tensor | None = None

    @property
    def file(self) -> Path:
        return self.parts[0].file

    @property
    def kind(self) -> str:
        return self.parts[0].kind

    @property
    def form(self) -> CodesForm | None:
        """How `codes` keeps the tensors together; None if it cannot."""
        known = [part.form for part in self.parts if part.form is not None]
        return common_form(known) if len(known) == len(self.parts) else None

    def codes(self) -> Codes:
        """Return the codes of all rows, of parts that have a form each."""
        found = stacked([part.codes() for part in self.parts])
        return found if self.order is None else found.of_outputs(self.order)

    def read(self) -> torch.Tensor:
        """Return the tensor as a checkpoint has it: in its own dtype, or fp32 if quantised."""
        joined = torch.cat([part.read() for part in self.parts], dim=self.axis)
        return (joined if self.order is None else joined[self.order]).reshape(self.shape)


def read_tensors(files: Sequence[Path]) -> dict[str, GGUFTensor | StackedTensor]:
    """Return the tensors of a model by name, without their numbers. The first file has settings.

    Raises ConfigError if a file is damaged or a tensor is in two files.
    """
    headers = [read_header(file) for file in files]
    settings = headers[0].settings
    architecture, own = architecture_of(settings), own_settings(settings)
    found: dict[str, GGUFTensor | StackedTensor] = {}
    tensors = without_drafter(all_tensors(headers), own)
    tensors = checked_tensors(settings, len(tokens_of(settings)), tensors)
    for name, stored in (tensors | absent_biases(architecture, tensors)).items():
        if name in FACTORS:
            continue
        if architecture == GPT_OSS and f"{STACKED}." in name:
            found |= _experts_in_turn(name, tensors)
            continue
        if joined := joined_names(name, architecture):
            if name == joined[0]:
                found[tensor_name(name, architecture)] = _stacked(tensors, joined, architecture)
            continue
        if architecture in DELTAS and f".{RATES}." in name:
            for rate, rows in rows_of_rates(own).items():
                renamed = tensor_name(name.replace(RATES, rate), architecture)
                found[renamed] = GGUFTensor(stored, rows, 0.0, transposed=False)
            continue
        if f".{GATE_UP}." in name:
            found |= _gates_and_ups(name, stored, architecture)
            continue
        order = row_order(name, architecture, own, stored.shape[0])
        for number, part in enumerate(_in_form(name, stored)):
            found[tensor_name(name, architecture, number)] = GGUFTensor(
                part,
                order,
                stored_offset(name, architecture),
                is_transposed(name, architecture),
                of_columns=name.endswith(".ssm_out.weight"),
                is_decay=name.endswith(".ssm_a"),
            )
    return found


def _gates_and_ups(
    name: str, stored: StoredTensor, architecture: str
) -> dict[str, GGUFTensor | StackedTensor]:
    """Return the gate and the up of each expert, of a tensor with those of all.

    They stay together if a checkpoint of the architecture has them so.
    """
    experts, outputs, inputs = stored.shape
    scales = stored.scales
    if len(scales) > 1:
        scales = tuple(scale for scale in scales for _ in GATE_AND_UP)
    shape = (2 * experts, outputs // 2, inputs)
    halves = split_parts(replace(stored, shape=shape, scales=scales))
    tensors = [GGUFTensor(half, None, 0.0, transposed=False) for half in halves]
    gate, up = (name.replace(GATE_UP, part) for part in GATE_AND_UP)
    if joined_names(gate, architecture):
        joined = StackedTensor(tuple(tensors), (experts, -1, inputs))
        return {tensor_name(gate, architecture): joined}
    return {
        tensor_name((gate, up)[number % 2], architecture, number // 2): tensor
        for number, tensor in enumerate(tensors)
    }


def _experts_in_turn(
    name: str, tensors: Mapping[str, StoredTensor]
) -> dict[str, GGUFTensor | StackedTensor]:
    """Return gpt-oss' matrices of all experts, [experts * outputs, inputs], or their biases.

    A checkpoint has the rows of gates and ups in turn. Of the ups alone, return none.
    """
    stored = tensors[name]
    if f".{UP}." in name:
        return {}
    pair = [stored, tensors[name.replace(GATE, UP)]] if f".{GATE}." in name else [stored]
    experts, is_bias = stored.shape[0], name.endswith(".bias")
    rest = () if is_bias else stored.shape[2:]
    shape = (experts * stored.shape[1], *rest)
    parts = tuple(GGUFTensor(replace(each, shape=shape), None, 0.0, False) for each in pair)
    order = None
    if f".{GATE}." in name:
        order = torch.arange(2 * shape[0]).view(2, -1).t().flatten()
    elif f".{DOWN}." not in name:  # of a file with fused experts
        order = torch.arange(shape[0]).view(experts, 2, -1).transpose(1, 2).flatten()
    target = (experts, -1) if is_bias else (-1, *rest)
    return {tensor_name(name, GPT_OSS): StackedTensor(parts, target, order=order)}


def _in_form(name: str, stored: StoredTensor) -> list[StoredTensor]:
    """Return the tensor in the checkpoint's shape, or each expert's or head's part of it."""
    is_vector = name.endswith((".ssm_a", ".ssm_d", ".ssm_norm.weight"))  # of groups, too
    has_heads = name.endswith("_norm.weight") and len(stored.shape) == 2 and not is_vector
    if name.endswith(f"{STACKED}.weight") or has_heads:
        return split_parts(stored)
    shape = stored.shape
    if name.endswith(".ffn_gate_inp_shexp.weight"):  # a matrix with one row
        shape = (1, shape[-1])
    elif name.endswith((".shortconv.conv.weight", ".ssm_conv1d.weight")):  # channels are apart
        channels, width = shape[-2:]
        shape = (channels, 1, width)
    elif is_vector:
        shape = (math.prod(shape),)
    return [replace(stored, shape=shape)]


def _stacked(
    tensors: Mapping[str, StoredTensor], names: Sequence[str], architecture: str
) -> StackedTensor:
    """Return the rows of these tensors as one, expert by expert or head by head."""
    by_name = []
    for name in names:
        stored, turned = tensors[name], is_transposed(name, architecture)
        pieces = split_parts(stored) if len(stored.shape) == 3 else [stored]
        by_name.append([GGUFTensor(piece, None, 0.0, transposed=turned) for piece in pieces])
    parts = tuple(part for parts in zip(*by_name, strict=True) for part in parts)
    shapes = [part.stored.shape[::-1] if part.transposed else part.stored.shape for part in parts]
    count, inputs = len(by_name[0]), shapes[0][1]
    are_experts = names[0].endswith(f"{STACKED}.weight")
    return StackedTensor(parts, (count, -1, inputs) if are_experts else (-1, inputs))


def decode(stored: StoredTensor) -> torch.Tensor:
    """Return the numbers of a tensor: fp32 if they are quantised, else in their own dtype."""
    if not stored.nbytes:  # an absent bias, or a tensor without numbers
        return torch.zeros(stored.shape)
    blocks = _blocks(stored)
    name = stored.kind.name
    if name in PLAIN:
        return blocks.flatten().view(PLAIN[name]).reshape(stored.shape)
    numbers = QUANTIZED[name](blocks).dequantize()
    for scale in stored.scales:
        numbers *= scale
    return numbers.reshape(stored.shape)


def _blocks(stored: StoredTensor) -> torch.Tensor:
    """Return the blocks of a tensor as they are stored, uint8 [blocks, bytes of a block]."""
    raw = torch.empty(stored.nbytes, dtype=torch.uint8)
    with stored.file.open("rb") as stream:
        stream.seek(stored.offset)
        if stream.readinto(raw.numpy().data) != stored.nbytes:
            raise ConfigError(f"{stored.file} became shorter while it was read.")
    return raw.view(-1, stored.kind.nbytes)
