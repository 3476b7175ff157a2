"""The lines that `penstock inspect` prints of a request with images."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from server.cli.inspect import show_waterfall

IMAGES = {"encoded": 1, "reused": 0, "units": 4, "encode_ms": 40.0, "wait_ms": 4.0}


def printed(images: dict[str, Any] | None) -> str:
    """Return what is printed of a request of 60 ms."""
    parts = dict.fromkeys(["server", "queue", "encoder", "base", "own", "others"], 10.0)
    choice = {
        "index": 0,
        "prompt_tokens": 90,
        "cached_tokens": 0,
        "images": images,
        "admitted": 44.0,
        "prefills": [[44.0, 50.0, 0, 90]],
        "preemptions": 0,
        "first_token": 50.0,
        "generated_tokens": 7,
        "finish": "length",
    }
    fit = {"steps": 0, "stalls": 0, "r2": None}
    report = {"id": "req_a", "state": "finished", "error": None, "wall_ms": 60.0, "parts": parts}
    file = io.StringIO()
    show_waterfall(
        report | {"choices": [choice], "who": [], "fit": fit}, Console(file=file, width=200)
    )
    return file.getvalue()


@pytest.mark.parametrize(
    ("counts", "line"),
    [
        ({}, "1 image encoded in 40.0 ms; prefill 90"),
        ({"encoded": 2, "reused": 1}, "2 images encoded in 40.0 ms, 1 reused; prefill 90"),
        ({"encoded": 0, "reused": 1}, "1 image reused; prefill 90"),
    ],
)
def test_images_of_a_request_are_printed_with_the_encoders_time(
    counts: dict[str, int], line: str
) -> None:
    text = printed(IMAGES | counts)
    assert line in text
    assert "encoder" in text


def test_request_without_images_has_no_encoder() -> None:
    assert "encoder" not in printed(None)
