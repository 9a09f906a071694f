"""Operations in an asyncio event loop."""

import asyncio


def wait_in_loop(operation):
    """The generator behind `await operation`."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def tell(_):
        if not ended.done():
            ended.set_result(None)

    def call_back(operation):
        try:
            loop.call_soon_threadsafe(tell, operation)
        except RuntimeError:
            pass  # the loop was closed, so nobody waits

    operation.add_done_callback(call_back)
    yield from ended.__await__()
    return operation.wait()
