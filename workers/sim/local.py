"""Workers inside this process, for tests, benchmarks and the command: started together, stopped together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from workers.sim.options import SimOptions, worker_options
from workers.sim.worker import Worker


@asynccontextmanager
async def running(options: SimOptions) -> AsyncIterator[list[Worker]]:
    """The workers that the options mean; port 0 gives each a free one."""
    async with AsyncExitStack() as parts:
        yield [await parts.enter_async_context(Worker(each)) for each in worker_options(options)]
