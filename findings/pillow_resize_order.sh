#!/usr/bin/env bash
# Image.resize gives other bytes in Pillow 12.1, 12.3 and 13.0, since the order of its two passes has
# changed twice. 12.1 always resizes the width first. 12.2 and 12.3 resize the height first for a
# picture more than 100 times as high as wide that gets lower. 13.0 does so for any picture that gets
# lower and wider, and for some that get lower and narrower. The two passes round to 8 bits between
# them, so the order shows: by more than 20 of 255 levels in pictures of noise.
# Two calls, one for each side, give the same bytes with every version.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --target "$folder/12.1" Pillow==12.1.1
"$folder/venv/bin/pip" install -q --target "$folder/12.3" Pillow==12.3.0
"$folder/venv/bin/pip" install -q --target "$folder/13.0" Pillow==13.0.0
cat > "$folder/order.py" <<'PYTHON'
import random
import sys

import PIL
from PIL import Image

# Width and height of a picture, and of the resized one.
SIZES = ((300, 211, 308, 196), (14, 2000, 28, 672), (59, 257, 43, 17), (131, 51, 54, 42))


def order(width, height, new_width, new_height):
    data = random.Random(1).randbytes(width * height * 3)
    picture = Image.frombytes("RGB", (width, height), data)
    target = (new_width, new_height)

    def by_two_calls(between):
        return picture.resize(between, 3).resize(target, 3).tobytes()

    at_once = picture.resize(target, 3).tobytes()
    firsts = {"width": (new_width, height), "height": (width, new_height)}
    [found] = [name for name, between in firsts.items() if by_two_calls(between) == at_once]
    return found


found = [order(*sizes) for sizes in SIZES]
print(f"Pillow {PIL.__version__}:", dict(zip(SIZES, found)))
sys.exit(found != sys.argv[1:])
PYTHON
run() {
    PYTHONPATH="$folder/$1" "$folder/venv/bin/python" "$folder/order.py" "${@:2}"
}
run 12.1 width width width width
run 12.3 width height width width
run 13.0 height height height width
