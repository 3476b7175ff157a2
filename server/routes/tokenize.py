"""POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from server.plan import chat_prompt, check_token_ids, off_loop
from server.schemas.body import documented, read_body
from server.schemas.tokenize import DetokenizeBody, TokenizeBody
from server.service import service_of

router = APIRouter()


@router.post("/tokenize", openapi_extra=documented(TokenizeBody))
async def tokenize(request: Request) -> dict[str, Any]:
    service = service_of(request)
    service.loaded()
    body = await read_body(request, TokenizeBody)
    service.model_name(body.model)
    if (text := body.prompt) is None:
        ids = await chat_prompt(service, body, len(await request.body()))
    else:
        add = body.add_special_tokens is not False
        encode = service.tokenizer.encode
        ids = await off_loop(len(text), lambda: encode(text, add_special_tokens=add))
    strings = [service.tokenizer.token_text(i) for i in ids] if body.return_token_strs else None
    return {
        "count": len(ids),
        "max_model_len": service.longest(),
        "tokens": ids,
        "token_strs": strings,
    }


@router.post("/detokenize", openapi_extra=documented(DetokenizeBody))
async def detokenize(request: Request) -> dict[str, Any]:
    service = service_of(request)
    service.loaded()
    body = await read_body(request, DetokenizeBody)
    service.model_name(body.model)
    check_token_ids(service, body.tokens, "tokens")
    ids, decode = body.tokens, service.tokenizer.decode
    text = await off_loop(len(ids), lambda: decode(ids, skip_special_tokens=False))
    return {"prompt": text}
