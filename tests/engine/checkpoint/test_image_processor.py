"""Which file the image processor's config is read from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.image_processor import KEY, with_image_processor
from engine.errors import ConfigError

VISION: dict[str, Any] = {"vision_config": {}}
OLD, NEW = {"image_mean": [0.1, 0.2, 0.3]}, {"image_mean": [0.4, 0.5, 0.6]}


def write(folder: Path, name: str, value: Any) -> None:
    (folder / f"{name}_config.json").write_text(json.dumps(value))


def test_without_a_file_or_a_vision_config_nothing_is_added(tmp_path: Path) -> None:
    assert with_image_processor(VISION, tmp_path) == VISION
    write(tmp_path, "preprocessor", OLD)
    assert with_image_processor({"vocab_size": 3}, tmp_path) == {"vocab_size": 3}


def test_a_nested_config_wins_as_a_whole(tmp_path: Path) -> None:
    write(tmp_path, "preprocessor", OLD | {"rescale_factor": 1.0})
    write(tmp_path, "processor", {"processor_class": "X"})
    assert with_image_processor(VISION, tmp_path)[KEY] == OLD | {"rescale_factor": 1.0}
    write(tmp_path, "processor", {KEY: NEW})
    assert with_image_processor(VISION, tmp_path)[KEY] == NEW


def test_a_config_that_is_no_object_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "processor", {KEY: [1]})
    with pytest.raises(ConfigError, match="image_processor must be an object"):
        with_image_processor(VISION, tmp_path)
