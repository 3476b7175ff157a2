"""/docs: the API in a browser, by Swagger UI. Its files come from the package fastapi-offline.

All addresses are relative, so that the page works behind a proxy that adds a prefix.
"""

from __future__ import annotations

from importlib.resources import as_file, files

from fastapi import APIRouter
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response

FILES = frozenset({"swagger-ui-bundle.js", "swagger-ui.css", "favicon.png"})

router = APIRouter(include_in_schema=False)


@router.get("/docs")
async def docs(request: Request) -> Response:
    """Return the page, which reads /openapi.json."""
    return get_swagger_ui_html(
        openapi_url="openapi.json",
        title=f"{request.app.title} API",
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="docs/favicon.png",
        # The extensions say which fields have no effect, and which are refused.
        swagger_ui_parameters={"tryItOutEnabled": True, "showExtensions": True},
    )


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    """Return the OpenAPI document."""
    return Response(request.app.openapi_json(), media_type="application/json")


@router.get("/docs/{name}")
async def docs_file(name: str) -> Response:
    """Return a file of the page."""
    if name not in FILES:
        raise HTTPException(404)
    with as_file(files("fastapi_offline") / "static" / name) as path:
        return FileResponse(path, headers={"cache-control": "max-age=86400"})
