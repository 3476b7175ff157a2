#!/usr/bin/env bash
# orjson 3.13.0 reads integers beyond 64 bits as floats, and refuses to write them.
#
# - loads("18446744073709551616") is the float 1.8446744073709552e+19; json and msgspec return the
#   integer. One less, 2**64 - 1, is an integer.
# - dumps(2**64) raises TypeError: a value read by json and written by orjson fails.
# - `default` is not called for such an integer, so that it cannot be written by a hook.
#
# It matters to servers that parse requests with orjson: a number in a tool's schema or in the
# arguments of a call reaches a chat template as 1e+20, and the model reads other digits.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet orjson==3.13.0 msgspec==0.22.0

"$folder/venv/bin/python" - <<'PYTHON'
import json
from decimal import Decimal

import msgspec
import orjson

print("orjson", orjson.__version__, "msgspec", msgspec.__version__)
for text in ("18446744073709551615", "18446744073709551616", "-9223372036854775809"):
    found = [loads(text) for loads in (orjson.loads, msgspec.json.decode, json.loads)]
    print(f"{text:24} orjson {found[0]!r:26} msgspec {found[1]!r:24} json {found[2]!r}")
    assert found[1] == found[2] == int(text)
    assert type(found[0]) is (int if text.endswith("615") else float)

called = []
try:
    orjson.dumps({"a": 2**64}, default=called.append)
except TypeError as error:
    print("dumps(2**64):", error)
else:
    raise SystemExit("the behaviour has changed: orjson writes 2**64")
assert not called, "the hook is called for large integers now"
written = orjson.dumps(Decimal("0.1000000000000000055"), default=lambda n: orjson.Fragment(str(n)))
print("dumps(Decimal) with a hook:", written.decode())
assert written == b"0.1000000000000000055"
PYTHON
