"""Record the pixels of transformers' processors with Pillow 12.3.

Run it as `PYTHONPATH=FOLDER:. python -m tests.server.images.processors.record_pixels`, where
`pip install --target FOLDER Pillow==12.3.0` has installed that version.
"""

from __future__ import annotations

import json
import sys

import PIL
import transformers

from tests.server.images.processors.cases import CASES, RAW, Case
from tests.server.images.processors.test_pixels import RECORDED, digest_of

VERSION = "12.3.0"


def digests(case: Case) -> dict[str, str]:
    found = {}
    for size in case.sizes:
        pixels = case.expected(case.reference_of(*case.pictures(size), **RAW))
        found[f"{size[0]}x{size[1]}"] = digest_of(pixels.astype("uint8"))
    return found


def main() -> int:
    if PIL.__version__ != VERSION:
        print(f"Pillow is {PIL.__version__}; the record is of {VERSION}.")
        return 1
    record = {
        "pillow": VERSION,
        "transformers": transformers.__version__,
        "digests": {case.name: digests(case) for case in CASES},
    }
    RECORDED.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
