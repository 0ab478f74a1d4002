"""Work that may wait for ever, in a thread that is given up."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger("moe_comm")


def run_bounded(work: Callable[[], object], *, timeout_s: float, name: str) -> bool:
    """work() in a thread of its own; whether it ended within timeout_s, by an exception too, which
    is logged alone. For what is given up, where there is nobody to tell."""

    def run() -> None:
        try:
            work()
        except Exception:  # whoever gives something up goes on without it
            logger.debug("%s", name, exc_info=True)

    thread = threading.Thread(target=run, name=f"moe_comm-{name}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()
