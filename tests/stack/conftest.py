from collections.abc import AsyncIterator

import pytest_asyncio

from tests.stack.harness import Stack


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_stack() -> AsyncIterator[Stack]:
    async with Stack() as stack:
        yield stack


@pytest_asyncio.fixture(loop_scope="session")
async def stack(shared_stack: Stack) -> Stack:
    """A running stack; its workers have forgotten what came before."""
    shared_stack.reset()
    return shared_stack
