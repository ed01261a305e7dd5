"""The limit of open files. Shells and service managers start processes with a soft limit of 1024, which is
meant for programs that call select(); ours use epoll. (Of an orchestrator, the journal of each run that is
under way, or that somebody reads, holds about six.)
"""

from __future__ import annotations

import resource


def raise_open_files() -> int:
    """Raises the soft limit to the hard one and returns it."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
