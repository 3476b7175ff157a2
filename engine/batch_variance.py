"""Why the bits of logits may depend on the other sequences in a step, and what prevents it."""

from __future__ import annotations

from typing import Literal

# Why the last bits of a sequence's logits depend on the other sequences in its step: the CPU's
# matrix unit (AMX), an old oneDNN, or weights that are not prepacked. None: no known reason.
BatchVariance = Literal["amx", "onednn", "unpacked", "gpu"] | None
# Why the bits of logits depend on the batch, and what prevents it.
BATCH_VARIANCE: dict[BatchVariance, tuple[str, str]] = {
    "amx": ("this CPU computes bf16 with AMX", "use --batch-invariant on (slower)"),
    "onednn": (
        "oneDNN in this version of torch splits a sum across threads",
        "use torch 2.11 or newer, or --threads 1",
    ),
    "unpacked": (
        "linear weights are not stored in oneDNN's layout",
        "use --prepack and a torch build with oneDNN",
    ),
    "gpu": ("a GPU chooses the order of a sum by the tokens in a step", "use --device cpu"),
}
