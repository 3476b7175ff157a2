"""`penstock api`: print the OpenAPI document of a server before its model is loaded."""

from __future__ import annotations

import json
import sys

from server.app import api_document


def main() -> int:
    """Print the document as JSON."""
    sys.stdout.write(json.dumps(api_document(), indent=1, ensure_ascii=False) + "\n")
    return 0
