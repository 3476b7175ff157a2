"""`penstock import nanochat` names what is damaged, and refuses files with code unexecuted."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.offline.nanochat.command import main
from tests.support.nanochat_files import (
    SIZES,
    TINY,
    encoding_state,
    imported,
    penstock,
    pickled_encoding,
    save_tokenizer,
)

pytestmark = pytest.mark.usefixtures("one_thread")
Damage = Callable[[Path], None]  # damages a base folder


def meta(**changes: Any) -> Damage:
    def damage(base: Path) -> None:
        file = base / "chatsft_checkpoints" / "d5" / "meta_000007.json"
        content = json.loads(file.read_text())
        content["model_config"] |= changes
        file.write_text(json.dumps(content))

    return damage


def tensors(edit: Callable[[dict[str, Any]], Any]) -> Damage:
    def damage(base: Path) -> None:
        state = dict(TINY.tensors)
        edit(state)
        torch.save(state, base / "chatsft_checkpoints" / "d5" / "model_000007.pt")

    return damage


def encoding(edit: Callable[[dict[str, Any]], Any]) -> Damage:
    def damage(base: Path) -> None:
        state = encoding_state(SIZES.vocab_size)
        edit(state)
        save_tokenizer(base / "tokenizer", state)

    return damage


def truncated(name: str) -> Damage:
    def damage(base: Path) -> None:
        file = base / name
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    return damage


def removed(name: str) -> Damage:
    return lambda base: (base / name).unlink()


MODEL = "chatsft_checkpoints/d5/model_000007.pt"
META = "chatsft_checkpoints/d5/meta_000007.json"
C_Q = "transformer.h.1.attn.c_q.weight"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (removed(MODEL), "d5 holds no model_<step>.pt"),
        (removed(META), "Cannot read .*meta_000007.json"),
        (removed("tokenizer/tokenizer.pkl"), "No tokenizer at .*--tokenizer"),
        (truncated(MODEL), "model_000007.pt is not a readable torch file"),
        (truncated(META), "Cannot read .*meta_000007.json"),
        (truncated("tokenizer/tokenizer.pkl"), "tokenizer.pkl is not a readable pickle"),
        (meta(n_layer="5"), r"meta_000007.json, model_config: .*n_layer"),
        (meta(vocab_size=None), r"meta_000007.json, model_config: .*vocab_size"),
        (meta(frozen_embd=True), r"model_config: .*unknown field `frozen_embd`"),
        (meta(window_pattern="SXL"), r"model_config: .*window_pattern"),
        (meta(n_embd=128), r"wte.weight in .*model_000007.pt has shape \[320, 64\].*\[300, 128\]"),
        (meta(vocab_size=200), r"wte.weight .* has shape \[320, 64\]; expected \[200, 64\]"),
        (meta(vocab_size=310), "tokenizer.pkl has 300 tokens, but vocab_size in .* is 310"),
        (tensors(lambda t: t.pop(C_Q)), rf"model_000007.pt lacks {C_Q}.*\[64, 64\]"),
        (tensors(lambda t: t.update({C_Q: t[C_Q][:8]})), rf"{C_Q} in .*\[8, 64\].*\[64, 64\]"),
        (tensors(lambda t: t.update(v0_lambdas=torch.ones(5))), "holds v0_lambdas"),
        (tensors(lambda t: t.update({C_Q: t[C_Q].int()})), f"{C_Q} in .* is torch.int32"),
        (tensors(lambda t: t.update(step=7)), "step in .* is int"),
        (
            tensors(lambda t: t.update({k: torch.ones(2, 16) for k in t if "ve_gate" in k})),
            "matches no known nanochat: .* 16 channels",
        ),
        (encoding(lambda e: e.update(pat_str="(")), "tokenizer.pkl: the split pattern"),
        (encoding(lambda e: e.update(extra=1)), "unknown field `extra`"),
        (encoding(lambda e: e.pop("pat_str")), "missing required field `pat_str`"),
        (encoding(lambda e: e["mergeable_ranks"].update({b"\x00": 299})), "expected ids"),
        (encoding(lambda e: e["special_tokens"].pop("<|output_end|>")), "299 tokens"),
        (
            encoding(lambda e: e.update(special_tokens={f"<{i}>": i for i in range(291, 300)})),
            "lacks the special tokens <|bos|>".replace("|", r"\|"),
        ),
    ],
)
def test_import_damaged_input_is_named_and_nothing_is_written(
    damage: Damage, said: str, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(base)
    assert main([str(base), "--out", str(base / "served")]) == 2
    message = capsys.readouterr().err
    assert re.search(said, message), message
    assert message.count("\n") == 1
    assert not [path for path in base.iterdir() if "served" in path.name]


def test_import_existing_output_folder_is_refused(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (base / "served").mkdir()
    assert main([str(base), "--out", str(base / "served")]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main([str(base / "nowhere")]) == 2
    assert main([str(base), "--step", "8"]) == 2
    assert "no model of step 8; steps found: 7" in capsys.readouterr().err


def test_import_full_disk_leaves_nothing_behind(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("engine.offline.nanochat.command.save_file", full)
    before = set(base.iterdir())
    with pytest.raises(ConfigError, match=r"Cannot write .*served: .*No space left"):
        imported(base, base / "served")
    assert set(base.iterdir()) == before


class Malice:
    """An object that creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


def test_import_code_in_tokenizer_is_refused_and_not_run(base: Path) -> None:
    mark = base / "mark"
    pickle.loads(pickle.dumps(Malice(mark)))
    assert mark.exists(), "the pickle should be harmful"
    mark.unlink()
    state = encoding_state(SIZES.vocab_size) | {"name": Malice(mark)}
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        whole, hidden = pickle.dumps(Malice(mark), protocol), pickled_encoding(state, protocol)
        for code in (whole, hidden):
            (base / "tokenizer" / "tokenizer.pkl").write_bytes(code)
            with pytest.raises(ConfigError, match=r"refers to [^t]"):
                imported(base, base / "served")
    answer = penstock(base, "--out", base / "served")
    assert answer.returncode == 2
    assert "posix.system" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert not mark.exists()


def test_import_code_in_weights_is_refused_and_not_run(base: Path) -> None:
    mark = base / "mark"
    torch.save(TINY.tensors | {"x": Malice(mark)}, base / MODEL)
    with pytest.raises(ConfigError, match=r"model_000007\.pt refers to (posix|nt)\.system"):
        imported(base, base / "served")
    assert not mark.exists()
