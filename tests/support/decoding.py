"""One request through the engine of a pipeline."""

from arpg import make_plan


def decode_request(pipe, request, settings):
    """The steps of a request that no task has built."""
    plan = make_plan(request.grid, request.known_BN, request.seeds, settings)
    return pipe.engine.decode(request, plan, settings)
