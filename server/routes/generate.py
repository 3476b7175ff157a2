"""What both generating routes do with a plan."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from server.answer import Answer, attended
from server.dialect import Dialect
from server.plan import Plan
from server.service import Service
from server.stream import TokenStream


async def respond(request: Request, service: Service, plan: Plan, dialect: Dialect) -> Response:
    """Submits the plan; a stream's headers wait for its first token, at most a ping's time, so
    that an early failure still has a status."""
    answer = Answer(service, plan, dialect)
    try:
        if plan.body.stream:
            await attended(request, answer.generation.begin(service.config.ping_interval))
            return TokenStream(answer)
        response = await answer.whole(request)
    except BaseException as error:
        answer.generation.close(error)
        raise
    answer.generation.close()
    return response
