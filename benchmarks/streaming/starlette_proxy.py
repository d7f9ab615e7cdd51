"""What many gateways are: Starlette takes the request, httpx passes it on, the bytes are yielded as they come."""

import contextlib
import os
from collections.abc import AsyncIterator

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

_DROPPED = ("host", "content-length", "transfer-encoding", "connection")


@contextlib.asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=os.environ["UPSTREAM"], limits=limits, timeout=None) as client:
        app.state.client = client
        yield


async def forward(request: Request) -> StreamingResponse:
    client: httpx.AsyncClient = request.app.state.client
    headers = [(name, value) for name, value in request.headers.items() if name not in _DROPPED]
    asked = client.build_request(request.method, request.url.path, headers=headers, content=await request.body())
    answer = await client.send(asked, stream=True)

    async def body() -> AsyncIterator[bytes]:
        try:
            async for piece in answer.aiter_raw():
                yield piece
        finally:
            await answer.aclose()

    kept = {name: value for name, value in answer.headers.items() if name not in _DROPPED}
    return StreamingResponse(body(), status_code=answer.status_code, headers=kept)


app = Starlette(routes=[Route("/{path:path}", forward, methods=["GET", "POST"])], lifespan=lifespan)
