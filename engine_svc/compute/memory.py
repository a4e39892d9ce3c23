"""How much memory this process may still take: of the machine, or of the container it runs in."""

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def free_memory_bytes(cgroup: Path = _CGROUP) -> int:
    """The lesser of what the machine has available and what the container's limit leaves."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return available  # not in a container with a limit of its own
    if limit == "max":
        return available
    return max(0, min(available, int(limit) - used))


def format_bytes(num_bytes: int) -> str:
    """`1.5 GiB`."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
