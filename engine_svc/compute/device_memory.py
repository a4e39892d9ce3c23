"""How much of a device's memory the KV cache gets, by what the largest step was seen to take."""

from engine_svc.compute.devices import DeviceMemory
from engine_svc.compute.memory import format_bytes
from protos.wire.errors import StartupError

# Of all the device's memory, what the engine may take when not told. Graphs come out of the rest,
# and options that copy logits, or gather long sequences.
_DEVICE_SHARE = 0.9
# The most that graphs take, and the most of what is free then.
_MAX_GRAPH_BYTES = 2 << 30
_MAX_GRAPH_SHARE = 0.5


def bytes_for_kv(memory: DeviceMemory, measured_kv_bytes: int) -> int:
    """What the engine's share leaves beside the model, the largest step and what others take.

    `memory` as the largest step left it, with a cache of measured_kv_bytes.
    """
    return int(memory.total * _DEVICE_SHARE) - _taken(memory, measured_kv_bytes)


def num_device_blocks(
    memory: DeviceMemory,
    measured_kv_bytes: int,
    wanted_bytes: int,
    block_bytes: int,
    most_useful: int,
) -> int:
    """How many KV blocks a device holds: wanted_bytes of them, or what there is room for.

    StartupError when that is more than there is, or less than a block.
    """
    left = bytes_for_kv(memory, measured_kv_bytes)
    needed = max(wanted_bytes, block_bytes)
    taken = _taken(memory, measured_kv_bytes)
    if needed > (memory.total - taken if wanted_bytes else left):
        raise StartupError(
            f"not enough memory on the device: {format_bytes(taken)} are taken by the model, its "
            f"largest step and others, {format_bytes(needed)} are needed for the KV cache, and "
            f"it has {format_bytes(memory.total)}"
        )
    if not wanted_bytes:
        return min(left // block_bytes, most_useful)
    if wanted_bytes < block_bytes:
        raise StartupError(
            f"the KV cache is given {format_bytes(wanted_bytes)}, "
            f"but one block takes {format_bytes(block_bytes)}: give it more with --kv-memory"
        )
    return wanted_bytes // block_bytes


def max_graph_bytes(free_bytes: int) -> int:
    """What graphs may take of what is free once all else has its memory."""
    return min(_MAX_GRAPH_BYTES, int(free_bytes * _MAX_GRAPH_SHARE))


def _taken(memory: DeviceMemory, measured_kv_bytes: int) -> int:
    """By all but the KV cache."""
    others = memory.total - memory.free - memory.reserved
    return others + memory.peak - measured_kv_bytes
