"""Write a folder with random weights as GGUF, by the converter of llama.cpp's source.

Arguments: the source, the folder, the GGUF file, its type, like bf16, and flags of the converter.
The converter knows tokenizers by what they return for a text, and the random models' is none of
them. It takes no BPE without merges, and looks for SentencePiece first, whose package is missing.
So all three are given to it. Tokens of prompts are the same, so that none changes a figure.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any


def convert(source: Path, folder: str, out: str, kind: str, *flags: str) -> None:
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    import gguf
    from conversion.base import TextModel  # type: ignore

    def one_merge(vocabulary: Any, path: Path) -> bool:
        """Stand-in for reading merges.txt, which is called if tokenizer.json has no merges."""
        vocabulary.merges = ["Ġ w"]
        return True

    gguf.SpecialVocab._try_load_merges_txt = one_merge
    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    TextModel._set_vocab_sentencepiece = lambda self: self._set_vocab_gpt2()
    program = source / "convert_hf_to_gguf.py"
    sys.argv = [str(program), folder, "--outfile", out, "--outtype", kind, *flags]
    runpy.run_path(str(program), run_name="__main__")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), *sys.argv[2:])
