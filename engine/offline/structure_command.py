"""Print the structure of a model as JSON: `python -m engine.offline.structure_command`.

The arguments are the model's folder, the number of positions that are served, the dtype, and "mtp"
if the prediction head drafts. A run on the meta device imports much of torch, which takes seconds.
So the server starts this process at the first request for the structure, and neither the engine nor
its start pays for it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import cast

import msgspec
import torch
from torch import nn

from engine.checkpoint.bounded_json import read_json
from engine.checkpoint.image_processor import with_image_processor
from engine.models.base import Predicts, on_meta_device
from engine.models.registry import model_class
from engine.offline.structure import structure_of


def main() -> int:
    folder, max_positions, dtype, *drafts = sys.argv[1:]
    os.nice(10)  # requests go first
    torch.set_num_threads(1)
    config = with_image_processor(read_json(Path(folder) / "config.json"), Path(folder))
    _, _, build = model_class(config)
    module = on_meta_device(build, config, int(max_positions), getattr(torch, dtype))
    head: nn.Module | None = None
    if drafts:
        with torch.device("meta"):
            head = cast(nn.Module, cast(Predicts, module).prediction_head())
    sys.stdout.buffer.write(msgspec.json.encode(structure_of(module, head)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
