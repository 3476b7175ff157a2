"""The memory that images take: their embeddings, their pixels, and the largest unit of encoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.layers.linear import Linear
from engine.models.base import image_encoder, image_token_bytes
from engine.models.vision.block import AT_ONCE_CPU, AT_ONCE_GPU, PatchEmbedding, VisionBlock
from engine.models.vision.gemma4 import Gemma4Vision, Gemma4VisionBlock

if TYPE_CHECKING:
    from engine.memory.model_plan import ModelPlan

EMBEDDING_BYTES = 256 << 20  # of images that are kept, unless those of one context take more
CACHED_PIXELS = 128 << 20  # that the API process keeps (CACHE_BYTES in server/images/pool.py)
# Two processes that decode. A picture of a few megapixels takes that; one of 50, up to 900 MiB.
DECODER_BYTES = 2 * (96 << 20)
# Of the pixels of all open requests: those that the API process reads, with its cache
# (MAX_OPEN_BYTES in server/images/pool.py), and those that wait in the engine (MAX_PIXEL_BYTES in
# admission.py).
MOST_READ = MOST_WAITING = 1 << 30
# Of pixels, for a token: a tile of SmolVLM's has 512 x 512 and 64 tokens, the most of all families.
TOKEN_PIXELS = 3 * 512**2 // 64
NUMBER_BYTES = 12  # of a pixel's channel while it is rescaled, in fp64 and fp32


def embedding_bytes(plan: ModelPlan, max_model_len: int) -> int:
    """Return the most bytes of encoded images that are kept; 0 if the model sees none.

    The images of a request fill its context at most, and must fit. More than all sequences can show
    would be of no use.
    """
    encoder = image_encoder(plan.model)
    if encoder is None:
        return 0
    of_context = max_model_len * image_token_bytes(encoder)
    return max(of_context, min(EMBEDDING_BYTES, plan.config.max_num_seqs * of_context))


def pixel_bytes(plan: ModelPlan, max_model_len: int) -> int:
    """Return the host's memory for pixels; 0 if the model sees none.

    That is for the processes that decode, the cache, and a request that fills its context, which is
    in the API process, on its way and in the engine. Further requests have theirs in addition,
    up to MOST_READ and MOST_WAITING.
    """
    if image_encoder(plan.model) is None:
        return 0
    return CACHED_PIXELS + DECODER_BYTES + 3 * max_model_len * TOKEN_PIXELS


def encoder_bytes(plan: ModelPlan) -> int:
    """Return the peak memory of a unit of encoding, without weights; 0 if the model sees none.

    That is the widest layer of a block, or the numbers of the patches, and the residual stream.
    """
    kinds = VisionBlock | Gemma4VisionBlock
    blocks = [each for each in plan.module.modules() if isinstance(each, kinds)]
    if not blocks:
        return 0
    size = plan.dtype.itemsize
    layers = [each for block in blocks for each in block.modules() if isinstance(each, Linear)]
    widest = max(sum(each.weight.shape) for each in layers if each.weight is not None)
    embeddings = [each for each in plan.module.modules() if isinstance(each, PatchEmbedding)]
    numbers = max(each.weight.shape[1] for each in embeddings if each.weight is not None)
    stream = 2 * blocks[0].attend.spec.num_heads * blocks[0].attend.spec.head_dim * size
    of_patch = stream + max(2 * widest * size, numbers * (NUMBER_BYTES + size))
    at_once = AT_ONCE_CPU if plan.device.type == "cpu" else AT_ONCE_GPU
    towers = [each for each in plan.module.modules() if isinstance(each, Gemma4Vision)]
    return of_patch * max(at_once, *(each.config.most_patches for each in towers), 0)
