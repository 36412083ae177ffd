"""The memory of a device."""

import os
from contextlib import suppress
from pathlib import Path

import torch


def memory_of(device: torch.device) -> float:
    """Return the size of a device's memory in bytes; on the CPU at most the container's limit."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[1])
    found = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no such limit, or the word "max"
            found = min(found, float(Path(limit).read_text()))
    return found
