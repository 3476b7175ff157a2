"""A worker for Penstock's engine without HTTP: the time of texts, one after another.

A process of its own, as each peer has. In the process of the load test, the engine's threads would
compete for the cores while a peer computes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tokenizers

from engine.config import EngineConfig
from loadtest.inprocess import Engine


def main() -> None:
    setup = json.loads(sys.stdin.readline())
    engine = Engine(EngineConfig(**setup))
    tokenizer = tokenizers.Tokenizer.from_file(str(Path(setup["model"]) / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    print("{}", flush=True)
    for line in sys.stdin:
        texts = json.loads(line)["texts"]
        times = [engine.embed([tokenizer.encode(text).ids]) for text in texts]
        print(json.dumps({"seconds": times}), flush=True)


if __name__ == "__main__":
    main()
