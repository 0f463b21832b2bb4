"""Anonymous shared memory: it has no name, so nothing of it remains when the processes that map it are gone."""

import ctypes
import mmap
import os
import sys
import weakref

PAGE_BYTES = mmap.PAGESIZE
_FAILED = ctypes.c_void_p(-1).value
_MADV_REMOVE = 9
_MADV_POPULATE_WRITE = 23  # since Linux 5.14

_library = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
if _library is not None:
    _library.mmap.restype = ctypes.c_void_p
    _library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    _library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    _library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def round_to_pages(num_bytes: int) -> int:
    """Return the next multiple of a page."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def create(num_bytes: int) -> int:
    """Return the descriptor of a new segment, which takes no memory yet.

    Raises:
        OSError: The system does not allow it.
    """
    descriptor = os.memfd_create("paceline", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, num_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def reserve(descriptor: int, first: int, length: int) -> None:
    """Allocate the memory of a part of a segment, on this process's memory node.

    Raises:
        OSError: There is not enough memory. Without this call, the first write there would get a SIGBUS.
    """
    os.posix_fallocate(descriptor, first, length)


class Segment:
    """A mapping of shared memory; it lives as long as something refers to `buffer`, as tensors made of it do.

    Args:
        descriptor: Descriptor that `create` returned, here or in another process; it may be closed afterwards.
        num_bytes: Size of the whole segment.
        own: First byte and length of the part that no process needs once this mapping is gone. Its memory is freed
            then, even if children that were forked meanwhile still map it.

    Raises:
        OSError: The segment cannot be mapped.
    """

    def __init__(self, descriptor: int, num_bytes: int, own: tuple[int, int] = (0, 0)) -> None:
        assert _library is not None
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED
        address = _library.mmap(None, num_bytes, protection, flags, descriptor, 0)
        if address == _FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.address: int = address
        self.buffer = (ctypes.c_ubyte * num_bytes).from_address(address)
        finalizer = weakref.finalize(self.buffer, _release, os.getpid(), address, num_bytes, *own)
        finalizer.atexit = False

    def populate(self) -> None:
        """Fill the page table now, after every rank has reserved its part: later each page costs a fault."""
        assert _library is not None
        _library.madvise(self.address, len(self.buffer), _MADV_POPULATE_WRITE)  # older kernels refuse: no harm


def _release(owner: int, address: int, num_bytes: int, first: int, length: int) -> None:
    assert _library is not None
    if os.getpid() == owner:  # a forked child has its own mapping, which ends with it
        if length > 0:
            _library.madvise(address + first, length, _MADV_REMOVE)
        _library.munmap(address, num_bytes)
