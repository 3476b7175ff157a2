"""The files and repositories that README and docs name, as small ones of the same kinds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from tests.deploy.documented import BLOCK
from tests.support.adapters import random_adapter
from tests.support.cross_encoder_cases import CASES, CrossEncoderCase
from tests.support.gguf_sidecars import write_pair
from tests.support.hub import Hub
from tests.support.nanochat_files import TINY, base_folder, save_checkpoint
from tests.support.pictures import file_of, gradient
from tests.support.process import ROOT
from tests.support.sentence_cases import SentenceCase
from tests.support.several import CHATS
from tests.support.tiny_gguf import CONTROL, NORMAL, write_tiny
from tests.support.tiny_smolvlm import SPECIAL, TEMPLATE, write_seeing

DEMO, SEEING_DEMO = ROOT / "engine/demo/model", ROOT / "engine/demo/vision"
COPIES = ("llama", "base", "tuned", "model-a", "model-b", "checkpoint-1000", "checkpoint-2000")
CHATS_OF_DEMO = (
    *("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen3-8B"),
    *("Qwen/Qwen2.5-3B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
    "meta-llama/Llama-3.3-70B-Instruct",
)
BATCH = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"messages": [{"role": "user", "content": "Hello!"}]},
}
MEAN = {"pooling_mode_mean_tokens": True}
ENDS = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}


def write_files(home: Path, work: Path) -> None:
    """Fill a home and a folder with what the pages' commands read."""
    for name in COPIES:
        shutil.copytree(DEMO, work / name)
    write_long_model(work / "long")
    random_adapter(work / "french", work / "base")
    random_adapter(work / "german", work / "base", seed=1)
    write_tiny(work / "model.gguf", more=CHATS)
    write_seeing_files(work / "folder-with-both", work / "seeing")
    SentenceCase("minilm", MEAN).write(work / "minilm")
    SentenceCase("qwen", ENDS, decoder={}).write(work / "embedding")
    case_of("bert").write(work / "reranker")
    case_of("softmax").write(work / "classifier")
    case_of("yes and no").write(work / "yes-or-no")
    texts = {
        "in.jsonl": json.dumps(BATCH) + "\n",
        "keys.txt": "a-key-of-a-user-of-this-server\n",
        "admins": "a-key-of-an-admin-of-this-server\n",
        "texts.txt": "A recipe for sourdough.\n\nStocks fell.\n",
        "recipe.yaml": block_of("merging.md", "yaml"),
        "models.toml": block_of("several-models.md", "toml").replace("/models/bge-small", "minilm"),
    }
    for name, text in texts.items():
        (work / name).write_text(text)
    (work / "cat.png").write_bytes(file_of(gradient(), "PNG"))
    nanochat = base_folder(home / ".cache" / "nanochat")
    save_checkpoint(nanochat / "base_checkpoints" / "d12", TINY, 4000)
    (home / "models").mkdir()
    shutil.copytree(DEMO, home / "models" / "demo-copy")
    (home / ".curlrc").write_text("fail-with-body\nsilent\n")


def write_long_model(folder: Path) -> None:
    """Write the demo with twice its context, for a page that serves an agent's model."""
    shutil.copytree(DEMO, folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] *= 2
    (folder / "config.json").write_text(json.dumps(config))


def block_of(page: str, language: str) -> str:
    """Return the text of the page's first block in a language."""
    blocks = BLOCK.finditer((ROOT / "docs" / page).read_text(encoding="utf-8"))
    return next(block[3] for block in blocks if block[2] == language)


def case_of(name: str) -> CrossEncoderCase:
    [case] = [case for case in CASES if case.name == name]
    return case


def write_seeing_files(folder: Path, checkpoint: Path) -> None:
    """Write a model and its image encoder as GGUF files."""
    from tokenizers import Tokenizer

    found = Tokenizer.from_file(str(write_seeing(checkpoint) / "tokenizer.json"))
    tokens = [found.id_to_token(number) for number in range(found.get_vocab_size())]
    write_pair(
        folder,
        checkpoint,
        {f"clip.vision.image_{key}": [0.5, 0.5, 0.5] for key in ("mean", "std")},
        template=TEMPLATE,
        tokens=tokens,
        token_type=[CONTROL if token in SPECIAL else NORMAL for token in tokens],
        merges=[],
        eos_token_id=found.token_to_id("<end_of_utterance>"),
    )


def repositories(work: Path) -> Iterable[Hub]:
    """Return what a hub has under the names in the pages."""
    named = dict.fromkeys(CHATS_OF_DEMO, work / "llama") | {
        "sentence-transformers/all-MiniLM-L6-v2": work / "minilm",
        "cross-encoder/ms-marco-MiniLM-L6-v2": work / "reranker",
        "Qwen/Qwen3-Embedding-0.6B": work / "embedding",
        "Qwen/Qwen3-Reranker-0.6B": work / "yes-or-no",
        "HuggingFaceTB/SmolVLM-256M-Instruct": work / "seeing",
    }
    for name, folder in named.items():
        yield Hub(name, files_of(folder))
    pair = files_of(work / "folder-with-both")
    [encoder] = [file for file in pair if file.startswith("mmproj-")]
    files = {
        "SmolVLM-500M-Instruct-Q8_0.gguf": pair["model.gguf"],
        "mmproj-SmolVLM-500M-Instruct-Q8_0.gguf": pair[encoder],
    }
    yield Hub("ggml-org/SmolVLM-500M-Instruct-GGUF", files)


def files_of(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
