"""The plan of a draft model: a second, smaller model that drafts tokens for the served one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from engine.checkpoint.folder import model_folder, read_config
from engine.checkpoint.image_processor import with_image_processor
from engine.checkpoint.tokenizer_file import check_tokenizer_file
from engine.errors import ConfigError
from engine.models.registry import model_class
from engine.scheduling.drafts import MOST_ROWS

if TYPE_CHECKING:
    from engine.memory.model_plan import ModelPlan

FLAG = "--speculative-model"
DRAFT_SLOTS = MOST_ROWS // 2  # sequences: with more of them, a step checks no drafts


def plan_draft(plan: ModelPlan) -> ModelPlan | None:
    """Return the plan of the draft model of `plan`, or None if its configuration names none.

    Raises ConfigError if the draft model cannot be served, or cannot draft for this model.
    """
    name = plan.config.speculative_model
    if name is None:
        return None
    if plan.config.speculation == "off":
        raise ConfigError(f"{FLAG} drafts tokens, and --speculation off forbids drafts; drop one.")
    if plan.kind != "decoder":
        raise ConfigError(
            f"{FLAG} is not possible: {plan.architecture} is an {plan.kind}, and drafts need a "
            "decoder."
        )
    try:
        draft = _plan(plan, name)
    except ConfigError as error:
        raise ConfigError(f"{FLAG} {name}: {error}") from error
    if draft.state_specs:
        raise ConfigError(
            f"{FLAG} {name}: {draft.architecture} has recurrent layers, and a draft model must "
            "attend in all of its layers."
        )
    _check_vocabularies(plan, draft)
    return draft


def num_draft_blocks(draft: ModelPlan) -> int:
    """Return the KV blocks of a draft model: for every slot a sequence of full length."""
    blocks = -(-draft.max_model_len // draft.config.block_size)
    return DRAFT_SLOTS * len(draft.kv_groups) * blocks


def draft_kv_bytes(draft: ModelPlan) -> int:
    """Return the bytes of a draft model's KV cache, with the null block."""
    return (num_draft_blocks(draft) + 1) * draft.block_bytes


def _plan(plan: ModelPlan, name: str) -> ModelPlan:
    folder = model_folder(name)
    hf_config = with_image_processor(read_config(folder), folder)
    architecture, kind, build = model_class(hf_config)
    if kind != "decoder":
        raise ConfigError(f"{architecture} is an {kind}; a draft model must be a decoder.")
    longest = build.read_config(hf_config).max_positions or plan.max_model_len
    config = replace(
        plan.config,
        model=name,
        speculation="off",
        speculative_model=None,
        lora_modules=(),
        max_loras=None,
        max_model_len=min(longest, plan.max_model_len),
        max_num_seqs=DRAFT_SLOTS,
    )
    return type(plan)(config)


def _check_vocabularies(plan: ModelPlan, draft: ModelPlan) -> None:
    """Raise ConfigError unless a token id means the same token to both models."""
    served, drafting = plan.model.config.vocab_size, draft.model.config.vocab_size
    if served != drafting:
        raise ConfigError(
            f"{FLAG} {draft.config.model} has a vocabulary of {drafting} tokens, and the served "
            f"model one of {served}. Use a draft model with the same tokenizer."
        )
    files = [folder / "tokenizer.json" for folder in (plan.folder, draft.folder)]
    if not all(file.is_file() for file in files):
        return  # the sizes are all that can be compared
    for file in files:
        check_tokenizer_file(file)
    if files[0].read_bytes() == files[1].read_bytes():
        return
    first, second = (_vocabulary(file) for file in files)
    if first == second:
        return
    token = next(token for token in {**first, **second} if first.get(token) != second.get(token))
    raise ConfigError(
        f"{FLAG} {draft.config.model} has another tokenizer than the served model: the token "
        f"{token!r:.200} has the id {second.get(token)}, and {first.get(token)} in the served "
        "model."
    )


def _vocabulary(file: Path) -> dict[str, int]:
    """Return the id of every token of a tokenizer.json."""
    from tokenizers import Tokenizer

    try:
        found: dict[str, int] = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises nothing more specific
        raise ConfigError(f"Cannot read {file}: {error}") from error
    return found
