"""SeenImages: the tokens of a step's slices that show images, with their embeddings."""

from __future__ import annotations

import pytest
import torch

from engine.ops.seen_tokens import SeenTokens
from engine.protocol.generate import Image, SamplingParams
from engine.scheduling.step import NewRow, ScheduledSlice, Step
from engine.vision.seen import SeenImages
from engine.vision.store import ImageStore

PARAMS = SamplingParams(1)
CAT = Image(b"cat", ((2, 3), (7, 2)))  # five tokens in two runs


def seen_images(*, sees_whole: bool = False) -> SeenImages:
    store = ImageStore(1000)
    store.hold([(b"cat", 20)])
    store.add(b"cat", torch.arange(5.0)[:, None])
    return SeenImages(store, torch.device("cpu"), sees_whole=sees_whole)


def new_row(row: int, *images: Image) -> NewRow:
    return NewRow(row, (1,) * 12, 12, PARAMS, images=images)


def chunk(row: int, start: int, count: int) -> ScheduledSlice:
    return ScheduledSlice(row, 0, row, start, count, samples=False)


def shown(seen: SeenTokens | None) -> dict[int, int]:
    assert seen is not None
    return dict(zip(seen.index.tolist(), seen.embeddings[:, 0].int().tolist(), strict=True))


def test_tokens_of_a_whole_prompt_show_all_embeddings() -> None:
    seen = seen_images()
    step = Step((chunk(0, 0, 12),), new_rows=(new_row(0, CAT),))
    assert shown(seen(step)) == {2: 0, 3: 1, 4: 2, 7: 3, 8: 4}


def test_chunks_cut_an_image_anywhere() -> None:
    seen = seen_images()
    seen(Step((chunk(0, 0, 1),), new_rows=(new_row(0, CAT),)))
    for start in range(12):
        for count in range(1, 13 - start):
            due = {2: 0, 3: 1, 4: 2, 7: 3, 8: 4}
            due = {at - start: k for at, k in due.items() if start <= at < start + count}
            found = seen(Step((chunk(0, start, count),)))
            assert (shown(found) if found else {}) == due


def test_tokens_of_an_image_see_up_to_its_end() -> None:
    seen = seen_images(sees_whole=True)
    found = seen(Step((chunk(1, 4, 1), chunk(0, 0, 9)), new_rows=(new_row(1), new_row(0, CAT))))
    assert found is not None
    assert found.last_keys is not None
    assert found.last_keys.tolist() == [4, 0, 1, 4, 4, 4, 5, 6, 8, 8]
    # A cached prefix may end inside the image.
    found = seen(Step((chunk(0, 3, 4),)))
    assert found is not None
    assert found.last_keys is not None
    assert found.last_keys.tolist() == [4, 4, 5, 6]
    assert seen(Step((chunk(0, 9, 3),))) is None


def test_a_step_that_ends_inside_an_image_is_noticed() -> None:
    seen = seen_images(sees_whole=True)
    with pytest.raises(AssertionError, match="ends inside an image"):
        seen(Step((chunk(0, 0, 4),), new_rows=(new_row(0, CAT),)))


def test_slices_of_other_rows_come_before_and_show_nothing() -> None:
    seen = seen_images()
    rows = new_row(0), new_row(3, CAT)
    found = seen(Step((chunk(0, 5, 1), chunk(3, 4, 4)), new_rows=rows))
    assert shown(found) == {1: 2, 4: 3}


def test_a_row_that_another_sequence_takes_shows_nothing() -> None:
    seen = seen_images()
    seen(Step((chunk(0, 0, 5),), new_rows=(new_row(0, CAT),)))
    assert seen(Step((chunk(0, 0, 12),), new_rows=(new_row(0),))) is None


def test_embeddings_of_deeper_layers_are_added_behind_their_layer() -> None:
    tokens = SeenTokens(torch.tensor([1]), torch.tensor([[1.0, 2.0, 10.0, 20.0]]))
    x = torch.full((3, 2), 0.5)
    assert tokens.place(x)[1].tolist() == [1.0, 2.0]
    assert tokens.add_deep(x, 0)[1].tolist() == [10.5, 20.5]
    assert tokens.add_deep(x, 1) is x
