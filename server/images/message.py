"""Messages between the server and the process that decodes images: a JSON object, and bytes."""

from __future__ import annotations

import json
import struct
from typing import Any

LENGTH = struct.Struct("<I")  # of the JSON, in bytes
Json = dict[str, Any]


def pack(head: Json, data: bytes = b"") -> bytes:
    text = json.dumps(head).encode()
    return b"".join((LENGTH.pack(len(text)), text, data))


def unpack(message: bytes) -> tuple[Json, bytes]:
    (length,) = LENGTH.unpack_from(message)
    end = LENGTH.size + length
    head: Json = json.loads(message[LENGTH.size : end])
    return head, message[end:]
