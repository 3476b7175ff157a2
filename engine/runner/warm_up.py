"""The first token of a loaded model, which pays for one-time costs."""

from __future__ import annotations

from engine.protocol.generate import SamplingParams
from engine.runner.model_runner import ModelRunner
from engine.scheduling.step import EncoderInput, NewBlocks, NewRow, ScheduledSlice, Step


def warm_up(runner: ModelRunner) -> int:
    """Compute one token, so that the first request does not pay for one-time costs.

    Returns the length of an encoder's vectors or logits, 0 for other models.
    """
    if runner.kind == "encoder":
        step = Step(encoder_inputs=(EncoderInput(0, (0,), is_pooled=True),))
        (output,) = runner.launch(step).embeddings()
        return len(output.vector) // 4  # fp32
    params = SamplingParams(max_tokens=1, temperature=1.0)
    row = NewRow(0, (0,), 1, params, encoder_length=1)
    decode = ScheduledSlice(id=0, epoch=0, row=0, start=0, count=1, samples=True)
    groups = runner.kv.groups
    blocks = tuple(NewBlocks(0, number, 0, (1,)) for number in range(len(groups)))
    cross = tuple((number, (1,)) for number, group in enumerate(groups) if group.is_cross)
    inputs = (EncoderInput(0, (0,), blocks=cross),) if cross else ()
    runner.launch(Step((decode,), (row,), blocks, encoder_inputs=inputs)).wait()
    runner.kv.scrub([1])
    return 0
