"""Access to /ui/api: it needs a header that pages of other origins cannot send."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request

from server.glassbox.state import Glassbox, glassbox_of
from server.http.addresses import serves_ui
from server.http.api_keys import keys_of
from server.http.auth import UI_HEADER, is_admin
from server.http.errors import ApiError, unsupported
from server.state import AppState, state_of


def state_for_ui(request: Request) -> AppState:
    """Return the state for a request to /ui/api.

    Raises a 404 ApiError where /ui/api is off, and a 403 without the header X-Penstock-UI, or if a
    proxy has forwarded the request to a server without keys.
    """
    state = state_of(request)
    if not serves_ui(state.config):
        message = "/ui/api is off; start the server with --ui and an API key."
        raise ApiError(404, "not_found", message)
    if UI_HEADER not in request.headers:
        message = "Requests to /ui/api need the header `X-Penstock-UI: 1`."
        raise ApiError(403, "missing_header", message)
    if not keys_of(request.app) and not is_admin(request):
        message = (
            "A proxy has forwarded this request, and the server has no API key, so /ui/api is "
            "refused. Start the server with --api-key-file, or open the pages without the proxy."
        )
        raise ApiError(403, "api_key_required", message)
    return state


def glassbox_for_ui(request: Request) -> Glassbox:
    """Return what the pages keep, for a request to /ui/api. Raises as `state_for_ui` does."""
    state_for_ui(request)
    return glassbox_of(request)


def refuse_unknown(names: Sequence[str]) -> None:
    """Raise a 400 ApiError that names the unknown fields of a body, if there are some.

    Other routes only report them, because programs send fields of other servers. The clients of
    /ui/api know its fields, so an unknown one is a mistake.
    """
    if names:
        fields = "field" if len(names) == 1 else "fields"
        raise unsupported(names[0], f"Unknown {fields}: {', '.join(names)}.")
