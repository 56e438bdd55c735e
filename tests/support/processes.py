"""A deployment's processes, any of which may end between two looks at it."""

from contextlib import suppress

import psutil

from cluster.local import LocalCluster


def gone(process: psutil.Process) -> bool:
    """Whether it has ended. A zombie has: who adopted it may not have looked yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def title_of(process: psutil.Process) -> str:
    """What `ps` shows of it; empty when it has ended."""
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def redis_server(cluster: LocalCluster) -> psutil.Process | None:
    """The embedded redis-server; None while none runs, or two, as one follows the other."""
    found = [process for process in cluster.processes() if "redis-server" in title_of(process)]
    return found[0] if len(found) == 1 else None
