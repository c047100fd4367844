"""A moment in shared memory until which a child may live: it ends itself when its supervisor is frozen or cut off."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
import weakref

_FORMAT = struct.Struct("d")


class Lifeline:
    """A deadline on the monotonic clock (which processes of one machine share), extended by the supervisor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        weakref.finalize(self, os.close, fd)
        self._memory = mmap.mmap(fd, mmap.PAGESIZE)

    @classmethod
    def create(cls) -> Lifeline:
        """An anonymous one; its descriptor is what children inherit."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("dbpartition-lifeline")
        else:
            fd, path = tempfile.mkstemp(prefix="dbpartition-lifeline-")
            os.unlink(path)
        os.ftruncate(fd, mmap.PAGESIZE)
        return cls(fd)

    def extend_to(self, monotonic_s: float) -> None:
        """Let children live until that moment of `time.monotonic()`."""
        self._memory[: _FORMAT.size] = _FORMAT.pack(monotonic_s)

    @property
    def remaining_s(self) -> float:
        """Seconds left; negative = it is over."""
        return float(_FORMAT.unpack(self._memory[: _FORMAT.size])[0]) - time.monotonic()
