"""Products that leave multiprocessors of a GPU free for what runs beside them.

cuBLAS gives a product on Hopper a block on every multiprocessor, each with all its registers, so
whatever is launched beside it waits until it ends. cublasSetSmCountTarget tells cuBLAS to plan for
fewer: https://docs.nvidia.com/cuda/cublas/#cublassetsmcounttarget. It is a target: which kernels
keep to it is cuBLAS's affair, to be measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator

import torch


def can_leave_free(device: torch.device) -> bool:
    """Whether `leave_free` has an effect: on NVIDIA GPUs, where torch has loaded cuBLAS."""
    return device.type == "cuda" and _cublas() is not None


@contextlib.contextmanager
def leave_free(count: int, device: torch.device) -> Iterator[None]:
    """Products by cuBLAS inside are planned for all multiprocessors but `count`.

    It changes torch's handle of this thread and device, nothing on the device, so it may be
    captured. Another number of multiprocessors may mean another kernel and another order of
    summation. No effect where `count` is 0 or not can_leave_free(device).

    Raises ValueError where the device has not more than `count`; RuntimeError where cuBLAS refuses.
    """
    if not count or not can_leave_free(device):
        yield
        return
    total = torch.cuda.get_device_properties(device).multi_processor_count
    if not 0 < count < total:
        raise ValueError(f"count: expected 0 to {total - 1} multiprocessors, got {count}")
    with torch.cuda.device(device):
        handle = torch.cuda.current_blas_handle()
    before = sm_count_target(handle)
    _set_target(handle, total - count)
    try:
        yield
    finally:
        _set_target(handle, before)


def sm_count_target(handle: int) -> int:
    """Multiprocessors that a cuBLAS handle plans for; 0: all."""
    target = ctypes.c_int(-1)
    library = _cublas()
    assert library is not None
    _check(library.cublasGetSmCountTarget(ctypes.c_void_p(handle), ctypes.byref(target)))
    return target.value


def _set_target(handle: int, count: int) -> None:
    library = _cublas()
    assert library is not None
    _check(library.cublasSetSmCountTarget(ctypes.c_void_p(handle), ctypes.c_int(count)))


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLAS refuses its number of multiprocessors: status {status}")


@functools.cache
def _cublas() -> ctypes.CDLL | None:
    """The cuBLAS that torch uses, or None. By its name without a path the loader finds the one that
    is loaded already."""
    version = torch.version.cuda
    if version is None:
        return None
    try:
        library = ctypes.CDLL(f"libcublas.so.{version.split('.')[0]}")
    except OSError:
        return None
    return library if hasattr(library, "cublasSetSmCountTarget") else None
