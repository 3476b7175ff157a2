"""Request bodies. A field is applied, accepted as harmless, refused, or listed as ignored."""

from server.schemas.body import Body, read_body
from server.schemas.generate import ChatBody, CompletionBody, GenerateBody
from server.schemas.tokenize import DetokenizeBody, TokenizeBody

__all__ = [
    "Body",
    "ChatBody",
    "CompletionBody",
    "DetokenizeBody",
    "GenerateBody",
    "TokenizeBody",
    "read_body",
]
