"""`penstock serve` with a damaged checkpoint exits with 2 and one message, and executes nothing.

Each case damages a sharded copy of the story checkpoint in one place. The copy also contains code
and pickles, which would create a file if anything executed them.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from server import exit_codes
from tests.support.serve import serving, starting

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
NORM, EMBED = "model.norm.weight", "model.embed_tokens.weight"
LOUD_S = 30  # for a busy machine; an idle one takes 2 s, mostly to import torch; promised: 5 s


class Bomb:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.proof,)


@dataclass(frozen=True)
class Model:
    """A checkpoint to damage. The file `proof` exists if any of its code was executed."""

    folder: Path
    proof: Path

    def json(self, name: str, **values: Any) -> None:
        """Set keys of a JSON file. None removes a key."""
        content = json.loads((self.folder / name).read_text()) | values
        kept = {key: value for key, value in content.items() if value is not None}
        (self.folder / name).write_text(json.dumps(kept))

    def tensors(self, file: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
        tensors = load_file(self.folder / file)
        change(tensors)
        save_file(tensors, self.folder / file)

    def template(self, source: str) -> None:
        (self.folder / "chat_template.jinja").write_text(source)

    def keep_header(self, file: str, length: int) -> None:
        """Make the file a header of `length` zero bytes, which takes no space on the disk."""
        path = self.folder / file
        path.write_bytes(length.to_bytes(8, "little"))
        os.truncate(path, 8 + length)

    def keep(self, file: str, end: int) -> None:
        path = self.folder / file
        path.write_bytes(path.read_bytes()[:end])


@pytest.fixture
def model(llama: Path, tmp_path: Path) -> Model:
    folder, proof = tmp_path / "model", tmp_path / "executed"
    folder.mkdir()
    for file in llama.glob("*.json"):
        shutil.copyfile(file, folder / file.name)
    tensors = load_file(llama / "model.safetensors")
    where = {name: FIRST if ".layers." in name else SECOND for name in tensors}
    for file_name in (FIRST, SECOND):
        part = {name: tensors[name] for name, file in where.items() if file == file_name}
        save_file(part, folder / file_name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    code = f"open({str(proof)!r}, 'w')\n"
    for name in ("modeling_tale.py", "tokenization_tale.py", "__init__.py", "conftest.py"):
        (folder / name).write_text(code)
    for name in ("pytorch_model.bin", "training_args.bin", "model.pt"):
        (folder / name).write_bytes(pickle.dumps(Bomb(proof)))
    return Model(folder, proof)


def split(pattern: str) -> dict[str, Any]:
    """A pre-tokenizer that splits at a regular expression."""
    found = {"pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Split", **found}


def replacing(content: str, *, times: int) -> dict[str, Any]:
    """Normalizers that replace each letter "a", one after the other."""
    one = {"type": "Replace", "pattern": {"String": "a"}, "content": content}
    return {"type": "Sequence", "normalizers": [one] * times}


FORGED = 'x\x1b[31m\n{"event": "forged"}'
Case = tuple[Callable[[Model], Any], list[str]]
CASES: dict[str, Case] = {
    "truncated shard": (
        lambda m: m.keep(SECOND, -100),
        [SECOND, "bytes, its header says", f"cut off in {NORM}"],
    ),
    "truncated header": (lambda m: m.keep(SECOND, 99), [SECOND, "a header of", "99 bytes"]),
    "missing shard": (lambda m: (m.folder / FIRST).unlink(), [INDEX, FIRST]),
    "wrong shape": (
        lambda m: m.tensors(SECOND, lambda t: t.update({NORM: torch.ones(65)})),
        [NORM, SECOND, "[65]", "[64]"],
    ),
    "not a number": (
        lambda m: m.tensors(SECOND, lambda t: t[EMBED][3].fill_(float("nan"))),
        [EMBED, SECOND, "NaN"],
    ),
    "missing tensor": (lambda m: m.tensors(SECOND, lambda t: t.pop(NORM)), [NORM, "lack"]),
    "extra tensor": (
        lambda m: m.tensors(SECOND, lambda t: t.update(surplus=torch.ones(2))),
        ["surplus", SECOND, "does not use"],
    ),
    "config field missing": (
        lambda m: m.json("config.json", num_hidden_layers=None),
        ["config.json", "'num_hidden_layers'"],
    ),
    "auto_map": (
        lambda m: m.json(
            "config.json", auto_map={"AutoModelForCausalLM": "modeling_tale.TaleForCausalLM"}
        ),
        ["config.json", "auto_map", "modeling_tale.TaleForCausalLM"],
    ),
    "config of fewer words": (
        lambda m: m.json("config.json", vocab_size=500),
        ["tokenizer.json", "500", "id 511"],
    ),
    "config of more words": (
        lambda m: m.json("config.json", vocab_size=576),
        [EMBED, SECOND, "[512, 64]", "[576, 64]"],
    ),
    "end token outside": (
        lambda m: m.json("generation_config.json", eos_token_id=[2, 700]),
        ["eos_token_id", "700", "512"],
    ),
    "no config": (lambda m: (m.folder / "config.json").unlink(), ["config.json"]),
    "GGUF folder": (
        lambda m: (
            [(m.folder / name).rename(m.folder / f"{name}.gguf") for name in (FIRST, SECOND)]
            + [(m.folder / INDEX).unlink()]
        ),
        [f"{FIRST}.gguf", f"{SECOND}.gguf", "several GGUF files"],
    ),
    "weights that block": (
        lambda m: ((m.folder / INDEX).unlink(), os.mkfifo(m.folder / "model.safetensors")),
        ["model.safetensors", "is not a file"],
    ),
    "huge header": (
        lambda m: m.keep_header(SECOND, 90_000_000),
        [SECOND, "a header of 90000000 bytes"],
    ),
    "tensor name with control characters": (
        lambda m: m.tensors(SECOND, lambda t: t.update({f"{FORGED}": torch.ones(2)})),
        [r"\x1b[31m", r'\n{"event": "forged"}', "does not use"],
    ),
    "template of parentheses": (
        lambda m: m.template("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"),
        ["chat_template.jinja", "cannot be compiled (RecursionError)"],
    ),
    "pattern of exponential time": (
        lambda m: m.json("tokenizer.json", pre_tokenizer=split("(a+)+$")),
        ["tokenizer.json", "short text"],
    ),
    "normalizers that multiply a text": (
        lambda m: m.json("tokenizer.json", normalizer=replacing("a" * 30, times=8)),
        ["tokenizer.json", "took more than 512 MiB of memory for short texts"],
    ),
    "normalizer that adds 10 MB": (
        lambda m: m.json(
            "tokenizer.json", normalizer={"type": "Prepend", "prepend": "x" * 10_000_000}
        ),
        ["tokenizer.json", "makes 10000001 characters of a text of 1"],
    ),
}


def refused(folder: Path, record_property: Callable[[str, object], None]) -> str:
    """Run `serve`, assert that it exits with one message, and return the message."""
    began = time.monotonic()
    with starting(folder) as server:
        status = server.status(LOUD_S)
        record_property("seconds", round(time.monotonic() - began, 2))
        assert "Traceback" not in server.log
        said = server.last_line
        chatter = "penstock: listening on", "penstock: starting", "penstock: loading weights"
        assert [line for line in server.log.splitlines() if not line.startswith(chatter)] == [said]
    assert status == exit_codes.BAD_CONFIG, said
    return said.removeprefix("penstock: ")


# The engine finds these after it has imported torch, as it does "wrong shape" and "auto_map".
SLOW = (
    *("not a number", "missing tensor", "extra tensor", "config field missing"),
    *("config of fewer words", "config of more words", "tensor name with control characters"),
    *("pattern of exponential time", "normalizers that multiply a text"),
    *("normalizer that adds 10 MB", "wrong shape", "end token outside"),
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES],
)
@pytest.mark.variants(1)
def test_serve_damaged_checkpoint_exits_with_one_message(
    model: Model, name: str, record_property: Callable[[str, object], None]
) -> None:
    damage, words = CASES[name]
    damage(model)
    said = refused(model.folder, record_property)
    for word in words:
        assert word in said
    assert not model.proof.exists(), "code of the checkpoint was executed"


def test_serve_gguf_file_exits_with_one_message(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    file = tmp_path / "model-Q4_K_M.gguf"
    file.write_bytes(b"GGUF\x03\0\0\0")
    said = refused(file, record_property)
    assert str(file) in said
    assert "not a readable GGUF file: byte 16 is expected in a file of 8 bytes" in said


@pytest.mark.slow
def test_serve_undamaged_checkpoint_becomes_ready(model: Model) -> None:
    """The cases above therefore fail because of their damage."""
    with serving(model.folder):
        assert not model.proof.exists()
