"""The GGUF files of our tests against those of llama.cpp's own converter, for decoders."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.checkpoint.gguf.header import read_header
from engine.checkpoint.gguf.tensors import decode
from tests.engine.checkpoint.gguf.test_converter_sidecars import converter
from tests.engine.checkpoint.gguf.test_llamas import CASES
from tests.support.gguf_files import write_gguf
from tests.support.golden import of_transformers

__all__ = ["converter"]  # a fixture
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
# The checkpoints have no tokenizers, whose classes the converter would ask for. Configs of GPT-NeoX
# that transformers 5 reads have the share of rotated dimensions under another name.
DRIVER = """
import runpy, sys
sys.argv[:] = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
sys.path.insert(0, sys.path[0] + "/gguf-py")
from conversion.base import TextModel
construct = TextModel.__init__
def without_vocabulary(self, *args, **more):
    construct(self, *args, **more)
    self.hparams.setdefault("rotary_pct", 0.25)
    self.set_vocab = lambda: self.gguf_writer.add_tokenizer_model("none")
TextModel.__init__ = without_vocabulary
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# The converter writes sizes of GLM's first releases that the file of a new checkpoint lacks.
WRONG = {"chatglm": {"context_length", "attention.layer_norm_rms_epsilon"}}
# It repeats some that have their defaults, and llama.cpp does not read the others.
EXTRA = {"vocab_size", "attention.value_length", "rope.dimension_count", "rope.freq_base"}
EXTRA |= {f"rope.scaling.yarn_{key}" for key in ("beta_fast", "beta_slow")}
EXTRA |= {"attention.head_count_kv", "attention.key_length", "rope.scaling.type"}


@pytest.mark.parametrize("case", CASES)
def test_files_of_the_tests_are_those_of_the_converter(
    case: str, converter: Path, tmp_path: Path
) -> None:
    name, config = CASES[case]
    folder, file = tmp_path / "checkpoint", tmp_path / "theirs.gguf"
    of_transformers(config(), folder)
    command = [sys.executable, "-c", DRIVER, str(converter), str(folder), "--outfile", str(file)]
    subprocess.run([*command, "--outtype", "f32"], check=True, capture_output=True)
    theirs, ours = read_header(file), read_header(write_gguf(tmp_path / "our.gguf", folder, name))
    ignored = {f"{name}.{key}" for key in EXTRA | WRONG.get(name, set())}
    found, due = (
        {key: value for key, value in each.settings.items() if key.startswith(f"{name}.")}
        for each in (ours, theirs)
    )
    assert {key for key in found if key not in ignored} == {k for k in due if k not in ignored}
    for key in found.keys() & due.keys() - ignored:
        assert found[key] == pytest.approx(due[key]), key
    assert theirs.tensors.keys() == ours.tensors.keys()
    for tensor, stored in theirs.tensors.items():
        assert stored.shape == ours.tensors[tensor].shape, tensor
        numbers, our_numbers = decode(stored), decode(ours.tensors[tensor])
        rounding = 1e-6 if tensor.startswith("rope_f") else 0  # both compute those factors
        torch.testing.assert_close(our_numbers.to(numbers.dtype), numbers, atol=0, rtol=rounding)
