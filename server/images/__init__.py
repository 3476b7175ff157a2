"""Images of requests: from a content part to the pixels that the engine encodes."""
