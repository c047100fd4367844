"""How much memory this process has held at most. Only the standard library."""

from __future__ import annotations

import re
import resource
from pathlib import Path

STATUS = Path("/proc/self/status")


def peak_mib() -> float:
    """Return the highest resident size so far, of this program alone.

    Elsewhere than on Linux it may be that of the program which started this one, where that was larger.
    """
    if STATUS.exists() and (found := re.search(r"^VmHWM:\s*(\d+) kB", STATUS.read_text(), re.MULTILINE)):
        return int(found[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
