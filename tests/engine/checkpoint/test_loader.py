"""A broken or hostile checkpoint raises a ConfigError that names the file and the fault.

The process turns a ConfigError into exit status 2.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.folder import safetensors_header, weight_files
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.runner.load import LoadedEngine, load_engine
from tests.support.driver import tiny_llama
from tests.support.golden import Tensors, edit_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")
EMBED, NORM = "model.embed_tokens.weight", "model.norm.weight"
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "model", num_hidden_layers=1, vocab_size=40, hidden_size=16)


def load(folder: Path) -> LoadedEngine:
    return load_engine(
        EngineConfig(
            model=str(folder),
            dtype="float32",
            device="cpu",
            threads=1,
            max_num_seqs=2,
            num_gpu_blocks_override=8,
        )
    )


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder)
    return str(caught.value)


def rewrite(folder: Path, change: Callable[[Tensors], Any]) -> None:
    edit_checkpoint(folder, lambda config, tensors: change(tensors))


def configure(folder: Path, **values: Any) -> None:
    edit_checkpoint(folder, lambda config, tensors: config.update(values))


def shard(folder: Path) -> list[Path]:
    """Split the checkpoint into two files and an index."""
    tensors = load_file(folder / FILE)
    (folder / FILE).unlink()
    names = sorted(tensors)
    where = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return weight_files(folder)


# ---- files -----------------------------------------------------------------------------------


def test_load_sharded_checkpoint_equals_single_file(folder: Path) -> None:
    whole = load(folder)
    assert len(shard(folder)) == 2
    again = load(folder)
    assert torch.equal(whole.plan.module.embed.weight, again.plan.module.embed.weight)
    assert again.facts.weight_bytes == whole.facts.weight_bytes
    assert whole.facts.weight_bytes == 4 * whole.facts.parameters


def test_load_missing_shard_raises_config_error(folder: Path) -> None:
    file = shard(folder)[1]
    file.unlink()
    said = refusal(folder)
    assert file.name in said
    assert str(folder) in said


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "sub/../../x", ""])
def test_load_index_naming_other_folders_raises_config_error(folder: Path, name: str) -> None:
    shard(folder)
    save_file({NORM: torch.ones(16)}, folder.parent / "outside.safetensors")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][NORM] = name
    (folder / INDEX).write_text(json.dumps(index))
    assert f"{INDEX} lists files not in" in refusal(folder)


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": [1]}}', "{", "\ufeff{}"]
)
def test_load_malformed_index_raises_config_error(folder: Path, content: str) -> None:
    shard(folder)
    (folder / INDEX).write_text(content)
    assert INDEX in refusal(folder)


def test_load_tensor_in_two_files_raises_config_error(folder: Path) -> None:
    first, second = shard(folder)
    repeated, weight = next(iter(load_file(first).items()))
    save_file({**load_file(second), repeated: weight}, second)
    said = refusal(folder)
    assert repeated in said
    assert str(first) in said
    assert str(second) in said


def test_load_without_safetensors_raises_config_error(folder: Path) -> None:
    (folder / FILE).rename(folder / "pytorch_model.bin")
    assert f"has no {FILE}" in refusal(folder)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_load_truncated_file_raises_config_error(folder: Path, keep: int) -> None:
    content = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(content[:keep])
    said = refusal(folder)
    assert f"{FILE} is not a readable safetensors file" in said
    assert f"{len(content[:keep])} bytes" in said


def test_load_truncated_file_names_first_missing_tensor(folder: Path) -> None:
    content = (folder / FILE).read_bytes()
    length = 8 + int.from_bytes(content[:8], "little")
    header = safetensors_header(folder / FILE)
    begin, _ = header[NORM]["data_offsets"]
    (folder / FILE).write_bytes(content[: length + begin + 1])
    said = refusal(folder)
    assert f"it has {length + begin + 1} bytes, its header says {len(content)}" in said
    assert f"cut off in {NORM}." in said


def with_header(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = (folder / FILE).read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    (folder / FILE).write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def test_load_of_a_file_that_is_no_gguf_raises_config_error_naming_it(folder: Path) -> None:
    (folder / FILE).rename(folder / "model-Q4_K_M.gguf")
    for model in (folder, folder / "model-Q4_K_M.gguf"):
        assert "model-Q4_K_M.gguf is not a readable GGUF file" in refusal(model)
    shutil.copy(folder / "model-Q4_K_M.gguf", folder / "other.gguf")
    (folder / "config.json").unlink()
    assert "choose one with --gguf-file: model-Q4_K_M.gguf, other.gguf" in refusal(folder)


def test_load_git_lfs_pointer_raises_config_error(folder: Path) -> None:
    (folder / FILE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert f"{FILE} is a Git LFS pointer, not the file. Run `git lfs pull`" in refusal(folder)


def test_load_too_long_header_raises_config_error(folder: Path) -> None:
    with (folder / FILE).open("r+b") as file:
        file.write(struct.pack("<Q", 101 << 20))
        file.truncate(102 << 20)  # sparse
    assert f"{FILE} is not a readable" in refusal(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header[NORM].update(data_offsets=header[EMBED]["data_offsets"]),
        lambda header: header[NORM].update(data_offsets=[-1, 63]),
        lambda header: header[NORM].update(shape=[1 << 62, 4]),
        lambda header: header[NORM].update(dtype="F7"),
        lambda header: header.update({NORM: None}),
        lambda header: header[NORM].update(data_offsets=[0, float("inf")]),
    ],
    ids=["overlap", "negative", "overflow", "dtype", "null", "infinite"],
)
def test_load_inconsistent_header_raises_config_error(
    folder: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    with_header(folder, change)
    assert f"{FILE} is not a readable" in refusal(folder)


# ---- tensors ---------------------------------------------------------------------------------


def test_load_missing_tensor_raises_config_error(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop(NORM))
    assert refusal(folder) == f"The weights in {folder} lack {NORM}."


def test_load_many_missing_tensors_are_counted(folder: Path) -> None:
    configure(folder, num_hidden_layers=3)
    assert "and 13 more" in refusal(folder)


def test_load_extra_tensor_raises_config_error(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update(surplus=torch.ones(2)))
    said = refusal(folder)
    assert f"{FILE} holds surplus" in said


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.bool, torch.float8_e4m3fn])
def test_load_wrong_dtype_raises_config_error(folder: Path, dtype: torch.dtype) -> None:
    rewrite(folder, lambda tensors: tensors.update({NORM: torch.ones(16).to(dtype)}))
    said = refusal(folder)
    assert f"{NORM} in {folder / FILE} has dtype {dtype}" in said
    assert "float32" in said


@pytest.mark.parametrize("shape", [(17,), (4, 4), (1,), (), (0,)])
def test_load_wrong_shape_raises_config_error(folder: Path, shape: tuple[int, ...]) -> None:
    rewrite(folder, lambda tensors: tensors.update({NORM: torch.ones(shape)}))
    said = refusal(folder)
    assert f"{NORM} in {folder / FILE} has shape {list(shape)}" in said
    assert "asks for [16]" in said


def test_load_wrong_shape_of_a_stacked_part_raises_config_error(folder: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones(4, 16)}))
    said = refusal(folder)
    assert f"{name} in {folder / FILE} has shape [4, 16]" in said
    assert "asks for [8, 16]" in said


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_load_nan_or_infinity_raises_config_error(
    folder: Path, value: float, dtype: torch.dtype
) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors[EMBED] = tensors[EMBED].to(dtype)
        tensors[EMBED][7, 3] = value

    rewrite(folder, spoil)
    assert refusal(folder) == f"{EMBED} in {folder / FILE} holds NaN or infinity."


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_load_half_precision_weights_is_exact(folder: Path, dtype: torch.dtype) -> None:
    rewrite(folder, lambda tensors: tensors.update({k: v.to(dtype) for k, v in tensors.items()}))
    stored = load_file(folder / FILE)[EMBED]
    assert torch.equal(load(folder).plan.module.embed.weight, stored.float())


# ---- config.json -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architectures", "said"),
    [
        (["MambaForCausalLM"], "MambaForCausalLM is not served; supported: "),
        ([], "(none given)"),
        (None, "(none given)"),
        ("LlamaForCausalLM", "(none given)"),
        ([["LlamaForCausalLM"], 3], "(none given)"),
    ],
)
def test_load_unknown_architecture_raises_config_error(
    folder: Path, architectures: Any, said: str
) -> None:
    configure(folder, architectures=architectures)
    assert said in refusal(folder)


@pytest.mark.parametrize("content", ["", "[]", "null", "{", "\x00", '"model"', '{"a":' * 9999])
def test_load_malformed_config_raises_config_error(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    assert "config.json" in refusal(folder)


@pytest.mark.parametrize("length", [None, 0, -5, "long", 2.5])
def test_load_invalid_context_length_raises_config_error(folder: Path, length: Any) -> None:
    configure(folder, max_position_embeddings=length)
    assert "max_position_embeddings" in refusal(folder)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "EvilForCausalLM"])
def test_load_checkpoint_with_code_never_runs_it(folder: Path, architecture: str) -> None:
    """`auto_map` is refused, because only our own code computes a model."""
    proof = folder / "it_ran"
    code = f"open({str(proof)!r}, 'w')\nclass EvilForCausalLM: pass\n"
    for name in ("modeling_evil.py", "configuration_evil.py", "__init__.py"):
        (folder / name).write_text(code)
    configure(
        folder,
        architectures=[architecture],
        auto_map={"AutoModelForCausalLM": "modeling_evil.EvilForCausalLM"},
        trust_remote_code=True,
    )
    before = set(sys.modules)
    said = refusal(folder)
    assert "auto_map" in said
    assert "modeling_evil.EvilForCausalLM" in said
    assert not proof.exists()
    assert not [name for name in set(sys.modules) - before if "evil" in name]


def test_load_never_opens_a_pickle(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"cbuiltins\nexit\n(tR.")
    load(folder)


# ---- anything --------------------------------------------------------------------------------


def mutate(content: bytes, rng: random.Random) -> bytes:
    """Return the content with one to four random edits, most of them in the header."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        end = len(data) if rng.random() < 0.3 else min(len(data), 1400)
        at = rng.randrange(max(end, 1))
        match rng.randrange(6):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                data[at : at + 1] = bytes([data[at] ^ 1 << rng.randrange(8)]) if data else b""
            case 2:
                del data[at : at + rng.randint(1, 40)]
            case 3:
                data[at:at] = data[at : at + rng.randint(1, 40)]
            case 4:
                data[at : at + 1] = rng.choice(b'0123456789{}[]",:').to_bytes()
            case 5:
                data = data[: rng.randrange(len(data) + 1)] or bytearray(b"\0")
    return bytes(data)


def test_load_mutated_file_succeeds_or_raises_config_error(folder: Path) -> None:
    content = (folder / FILE).read_bytes()
    rng = random.Random(5)
    outcomes = {"loaded": 0, "unreadable": 0, "refused": 0}
    for _ in range(200):
        (folder / FILE).write_bytes(mutate(content, rng))
        try:
            load(folder)
            outcomes["loaded"] += 1
        except ConfigError as error:
            outcomes["unreadable" if "not a readable" in str(error) else "refused"] += 1
    assert min(outcomes.values()) >= 5, f"the mutations are too weak or too strong: {outcomes}"
