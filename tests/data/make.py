"""Make the tokenizers and checkpoints of this folder again: `python -m tests.data.make [NAME …]`.

The answers in expected.json are those of transformers in fp32. It takes some minutes.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.data.tales import tale
from tests.data.vocabularies import byte_fallback, byte_level, unigram, wordpiece

FOLDER = Path(__file__).parent
ROWS, LENGTH, RATE = 16, 256, 4e-3
TOKENS = 120  # of each answer
GAP = 0.05  # nats between the best token and the next one, at least
BOS, EOS = 1, 2
PROMPTS = [
    "", "Once upon a time,", "Lily and Ben went to the", "Tim had a toy car. He",
    "One day, a girl found a kite.", "Then she walked to the", "They saw a boat",
]  # fmt: skip
MOST_CASES = 5
TOKENIZERS = {"byte-level": byte_level, "wordpiece": wordpiece, "unigram": unigram}
SIZES: dict[str, Any] = {"vocab_size": 512, "bos_token_id": BOS, "eos_token_id": EOS}


def llama() -> torch.nn.Module:
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        **SIZES,
    )
    return LlamaForCausalLM(config)


def gpt2() -> torch.nn.Module:
    dropout = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
    config = GPT2Config(
        n_embd=64, n_inner=128, n_layer=3, n_head=8, n_positions=512, **dropout, **SIZES
    )
    return GPT2LMHeadModel(config)


CHECKPOINTS = {"tales-llama": (llama, 1200), "tales-gpt2": (gpt2, 600)}  # and training steps


def batches(tokenizer: Tokenizer) -> Iterator[torch.Tensor]:
    """Tales one behind the other, each with its beginning and end, in rows of LENGTH tokens."""
    random = Random(7)
    ids: list[int] = []
    while True:
        while len(ids) < ROWS * LENGTH:
            ids += [*tokenizer.encode(tale(random)).ids, EOS]
        yield torch.tensor(ids[: ROWS * LENGTH]).view(ROWS, LENGTH)
        ids = ids[ROWS * LENGTH :]


def train(model: torch.nn.Module, tokenizer: Tokenizer, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    for step, ids in zip(range(steps), batches(tokenizer), strict=False):
        share = step / steps
        optimizer.param_groups[0]["lr"] = RATE * min(1, share * 20) * math.cos(share * 1.5)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


@torch.inference_mode()
def answer(model: torch.nn.Module, tokenizer: Tokenizer, prompt: str) -> dict[str, Any] | None:
    """The greedy answer to a prompt, or None if it ends early or is not certain."""
    prompt_ids = tokenizer.encode(prompt).ids
    ids: list[int] = []
    scores: list[float] = []
    for _ in range(TOKENS):
        logits = model(torch.tensor([[*prompt_ids, *ids]])).logits[0, -1]
        best, second = logits.log_softmax(-1).topk(2).values.tolist()
        if best - second < GAP:
            return None
        ids.append(int(logits.argmax()))
        scores.append(round(best, 5))
    if EOS in ids:
        return None
    text = tokenizer.decode(ids)
    return {
        "prompt": prompt, "prompt_ids": prompt_ids, "ids": ids, "logprobs": scores, "text": text,
    }  # fmt: skip


def write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")


def make_checkpoint(name: str) -> None:
    folder = FOLDER / "checkpoints" / name
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_fallback()
    torch.manual_seed(0)
    make, steps = CHECKPOINTS[name]
    model = make()
    train(model, tokenizer, steps)
    for parameter in model.parameters():  # few bits, so that the file packs well
        parameter.data = parameter.data.bfloat16().float()
    model.eval()
    cases = [case for prompt in PROMPTS if (case := answer(model, tokenizer, prompt))]
    print(name, len(cases), "cases;", cases[0]["text"])
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True}
    settings |= {"add_eos_token": False, "clean_up_tokenization_spaces": False, **tokens}
    write(folder / "special_tokens_map.json", tokens)
    write(folder / "tokenizer_config.json", settings | {"model_max_length": 512})
    write(folder / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": [BOS, EOS]})
    write(folder / "expected.json", {"cases": cases[:MOST_CASES]})


def make_tokenizer(name: str) -> None:
    folder = FOLDER / "tokenizers" / name
    folder.mkdir(parents=True, exist_ok=True)
    TOKENIZERS[name]().save(str(folder / "tokenizer.json"))


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:] or [*TOKENIZERS, *CHECKPOINTS]:
        make = make_tokenizer if name in TOKENIZERS else make_checkpoint
        make(name)


if __name__ == "__main__":
    main()
