"""The connection of this process to its server; empty where the package is used without one."""


class _Runtime:
    channel = None
    outputs = None  # Arena that this process fills.
    regions = {}  # Mapped regions that the server fills, by number.
    files = {}  # Clients' objects of shared memory, by number.
    is_decoupled = False
    log_verbose = False


runtime = _Runtime()

# Tensors up to this size travel inside messages: cheaper than a block of shared memory.
INLINE_BYTES = 4096


def channel():
    """The channel. TritonModelException without a server."""
    if runtime.channel is None:
        from ._errors import TritonModelException

        raise TritonModelException("this needs a server: the module runs outside of a model process")
    return runtime.channel
