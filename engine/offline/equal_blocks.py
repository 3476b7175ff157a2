"""Equal blocks of a model as one: what a reader of its structure needs to see once."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec.structs import replace

from engine.protocol.structure import ModelBox

BLOCK = re.compile(r"(?P<list>.*?)\.(?P<index>\d+)(?:\.(?P<part>.*))?")
OPERATION = re.compile(r"(?<=\w) \d+$")  # the number that makes the name of an operation unique


def without_equal_blocks(boxes: Sequence[ModelBox]) -> list[ModelBox]:
    """Return the boxes with only the first of equal blocks, which gets the indices of all of them.

    Blocks are equal if their boxes are, but for the inputs and the windows.
    """
    blocks: dict[tuple[str, int], list[int]] = {}  # indices of boxes
    for index, box in enumerate(boxes):
        if match := BLOCK.fullmatch(box.name):
            blocks.setdefault((match["list"], int(match["index"])), []).append(index)
    stands_for = dict(enumerate(range(len(boxes))))
    known: dict[tuple[object, ...], list[int]] = {}
    layers: dict[int, list[int]] = {}  # by the first box of a kept block
    for (name, number), indices in sorted(blocks.items()):
        key = (name, *(_without_place(boxes[index]) for index in indices))
        kept = known.setdefault(key, indices)
        layers.setdefault(kept[0], []).append(number)
        stands_for.update(zip(indices, kept, strict=True))
    _drop_operations_between(boxes, blocks, stands_for)
    places = {index: i for i, index in enumerate(i for i, kept in stands_for.items() if i == kept)}
    found = []
    for index in places:
        box = boxes[index]
        inputs = sorted({places[stands_for[source]] for source in box.inputs})
        block = BLOCK.fullmatch(box.name)
        numbers: tuple[int, ...] = ()
        if block and block["part"] is None:
            numbers = tuple(layers[blocks[block["list"], int(block["index"])][0]])
        found.append(replace(box, inputs=tuple(inputs), layers=numbers))
    return found


def _without_place(box: ModelBox) -> ModelBox:
    """Return a box without what depends on its place in the model."""
    match = BLOCK.fullmatch(box.name)
    part = OPERATION.sub("", (match and match["part"]) or "")
    facts = box.attention and replace(box.attention, window=None)
    return replace(box, name=part, inputs=(), attention=facts)


def _drop_operations_between(
    boxes: Sequence[ModelBox],
    blocks: dict[tuple[str, int], list[int]],
    stands_for: dict[int, int],
) -> None:
    """Let operations between two blocks of a list stand for the one before the first block."""
    for name in {name for name, _ in blocks}:
        entries = [i for i, box in enumerate(boxes) if _is_block_of(name, box)]
        kept = [i for i in range(entries[0]) if stands_for[i] == i]
        before = [i for i in kept if _is_outer_operation(boxes[i])]
        for index in range(entries[0], entries[-1]):
            if before and _is_outer_operation(boxes[index]):
                stands_for[index] = before[-1]


def _is_block_of(name: str, box: ModelBox) -> bool:
    match = BLOCK.fullmatch(box.name)
    return match is not None and match["list"] == name and match["part"] is None


def _is_outer_operation(box: ModelBox) -> bool:
    """Whether this is an operation outside of all blocks."""
    return BLOCK.fullmatch(box.name) is None and bool(OPERATION.search(box.name))
