"""Calls to the engine behind an adapter. What goes wrong is EngineRefused (4xx) or EngineFailed (all else)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

import aiohttp
import orjson

from kernel_steer.node.engine import EngineFailed, EngineRefused


class EngineHttp:
    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url.rstrip("/")
        self._session = session

    async def is_healthy(self) -> bool:
        try:
            async with self._session.get(
                f"{self._url}/health", timeout=aiohttp.ClientTimeout(total=5)
            ) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def get(self, path: str) -> Any:
        return await self._json(self._session.get(self._url + path))

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        return await self._json(self._session.post(self._url + path, json=body))

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
        """The events of a stream, as they came. Leaving early closes the connection, which aborts the work."""
        try:
            async with self._session.post(self._url + path, json=body) as response:
                await _raise_for_status(response)
                buffer = b""
                async for piece in response.content.iter_any():
                    *events, buffer = (buffer + piece).split(b"\n\n")
                    for event in events:
                        yield event
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineFailed(f"engine connection lost ({type(error).__name__})") from error

    async def _json(self, call: Any) -> Any:
        try:
            async with call as response:
                await _raise_for_status(response)
                return orjson.loads(await response.read())
        except (aiohttp.ClientError, TimeoutError, OSError, orjson.JSONDecodeError) as error:
            raise EngineFailed(f"engine call failed ({type(error).__name__})") from error


async def _raise_for_status(response: aiohttp.ClientResponse) -> None:
    if response.status < 400:
        return
    try:
        error = orjson.loads(await response.read())["error"]
        message = error if isinstance(error, str) else str(error["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        message = f"status {response.status}"
    if response.status < 500 and response.status != 429:
        raise EngineRefused(message)
    raise EngineFailed(f"engine error: {message}")
