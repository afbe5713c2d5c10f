"""Reflection over gRPC, bounded in time."""

import asyncio
import contextlib
from typing import Any

from grpc_reflection.v1alpha._async import ReflectionServicer

REFLECTION_S = 10.0


class BoundedReflection(ReflectionServicer):
    """Reflection, which needs no key: each call ends after a while, so that nobody occupies calls with it."""

    async def ServerReflectionInfo(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802  # the library's name
        """The responses to the requests of a stream."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REFLECTION_S):
                responses: Any = super().ServerReflectionInfo(request_iterator, context)
                async for response in responses:
                    await context.write(response)
