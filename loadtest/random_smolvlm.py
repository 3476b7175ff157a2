"""A checkpoint of SmolVLM-256M's shape with random weights, for measurements of speed only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from loadtest.random_model import LLAMA_125M, byte_tokenizer, llama_shapes

TEXT = LLAMA_125M | {
    "vocab_size": 49280,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": False,
}
VISION = {
    "model_type": "smolvlm_vision",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 512,
    "patch_size": 16,
}
SCALE = 4  # patches along a side of the square that becomes one token
PER_TILE = 64  # tokens
WORDS = 49152  # of the tokenizer, without the tokens below
FAKE, IMAGE = "<fake_token_around_image>", "<image>"
OVERVIEW, END = "<global-img>", "<end_of_utterance>"
GAP = "\n\n"  # between the tiles and the overview: one token, as in the released checkpoints
TAGS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
PROCESSOR = {
    "image_processor_type": "SmolVLMImageProcessor",
    "size": {"longest_edge": 2048},
    "max_image_size": {"longest_edge": 512},
    "do_image_splitting": True,
    "resample": 1,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def write_random_smolvlm(folder: Path, *, edge: int | None = None) -> None:
    """Write config, bf16 weights (seed 0), a tokenizer, a template and the processor's settings.

    The longer side of a picture becomes `edge` pixels, by default as published.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in smolvlm_shapes():
        if name.endswith(".bias"):
            weight = torch.zeros(shape)
        elif len(shape) == 1:
            weight = torch.ones(shape)
        else:
            weight = torch.randn(shape, generator=generator) * 0.02
        tensors[name] = weight.bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["SmolVLMForConditionalGeneration"],
        "model_type": "smolvlm",
        "text_config": TEXT | {"architectures": ["VLlama3ForCausalLM"], "pad_token_id": 2},
        "vision_config": VISION,
        "scale_factor": SCALE,
        "image_token_id": _write_tokenizer(folder),
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    processor = PROCESSOR if edge is None else PROCESSOR | {"size": {"longest_edge": edge}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_len": PER_TILE}))


def _write_tokenizer(folder: Path) -> int:
    """Write a byte-level tokenizer with filler words; return the token of images."""
    tokenizer = byte_tokenizer(WORDS)
    tokenizer.add_special_tokens([FAKE, IMAGE, OVERVIEW, END, GAP, *TAGS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    number = tokenizer.token_to_id(IMAGE)
    assert number is not None
    return number


def smolvlm_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and the shape of each tensor."""
    for module, shape in llama_shapes(TEXT).items():
        yield module.replace("model.", "model.text_model.", 1) + ".weight", shape
    hidden, inner = 768, 3072
    yield "lm_head.weight", (49280, 576)
    yield "model.connector.modality_projection.proj.weight", (576, hidden * SCALE**2)
    tower = "model.vision_model."
    yield f"{tower}embeddings.position_embedding.weight", (1024, hidden)
    yield from _linear(f"{tower}embeddings.patch_embedding", (hidden, 3, 16, 16))
    yield from _linear(f"{tower}post_layernorm", (hidden,))
    for index in range(12):
        layer = f"{tower}encoder.layers.{index}."
        for name in ("layer_norm1", "layer_norm2"):
            yield from _linear(layer + name, (hidden,))
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _linear(f"{layer}self_attn.{name}", (hidden, hidden))
        yield from _linear(f"{layer}mlp.fc1", (inner, hidden))
        yield from _linear(f"{layer}mlp.fc2", (hidden, inner))


def _linear(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[:1]
