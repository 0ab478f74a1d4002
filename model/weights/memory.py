"""Host and device memory while weights load: what is held beyond the weights themselves.

Host memory is RssAnon of /proc/self/status (what this process wrote and holds; the page cache is
not in it) plus pinned staging, which the driver maps. A thread samples it; device memory is the
allocator's own peak, read at every step.
"""

from __future__ import annotations

import mmap
import threading
from dataclasses import dataclass, field
from types import TracebackType

import torch
from torch import Tensor

SAMPLE_SECONDS = 0.005


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Memory at one step of a load, all in bytes. `label` names the step (a layer)."""

    label: str
    read: int
    resident: int
    host: int
    device: int


@dataclass(kw_only=True)
class MemoryMeter:
    """Samples memory between enter and exit.

    Attributes:
        device: where the weights go.
        pinned: bytes of pinned host memory held throughout; counted as extra.
        resident: bytes of weights in place so far, as told by `step`.
        samples: one for each `step`.
        peak_host_extra, peak_device_extra: the largest excess seen, at least 0.
    """

    device: torch.device
    pinned: int = 0
    resident: int = 0
    samples: list[Sample] = field(default_factory=list)
    peak_host_extra: int = 0
    peak_device_extra: int = 0
    _base_host: int = 0
    _base_device: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> MemoryMeter:
        if self._on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._base_device = torch.cuda.memory_allocated(self.device)
        # After the driver has started, whose memory is not the load's.
        self._base_host = rss_anon()
        self._thread = threading.Thread(target=self._watch, name="memory-meter", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._look()

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def peak_extra(self) -> int:
        """Host and device peaks added, as if they had come at once."""
        return self.peak_host_extra + self.peak_device_extra

    def step(self, label: str, *, read: int, resident: int, reserved: int) -> None:
        """Note progress: `read` bytes so far, `resident` bytes of weights in place, `reserved`
        bytes of runtime buffers allocated."""
        self.resident = resident
        host = self._look()
        device = 0
        if self._on_gpu:
            device = torch.cuda.memory_allocated(self.device) - self._base_device
            peak = torch.cuda.max_memory_allocated(self.device) - self._base_device
            self.peak_device_extra = max(self.peak_device_extra, peak - reserved)
        self.samples.append(
            Sample(label=label, read=read, resident=resident, host=host, device=device)
        )

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self._look()

    def _look(self) -> int:
        # Read before RssAnon: a put in between then counts as extra, never hides any.
        resident = 0 if self._on_gpu else self.resident
        host = rss_anon() - self._base_host + self.pinned
        self.peak_host_extra = max(self.peak_host_extra, host - resident)
        return host


def rss_anon() -> int:
    """Bytes of anonymous memory this process holds now."""
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status: expected a line RssAnon, got none")


def mapped_bytes(nbytes: int) -> Tensor:
    """uint8 [nbytes] on the CPU, of pages that go back to the system with the tensor. What malloc
    gave of such sizes it may keep once freed, and a load's buffers would stay in its way."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)


def draw_curve(samples: list[Sample], *, width: int = 64, height: int = 12) -> str:
    """Memory held (host + device, less what was there at the start) against bytes read, as text.
    One character is one bucket of bytes read and shows the bucket's largest value."""
    if not samples:
        return "no samples"
    end = max(sample.read for sample in samples) or 1
    values = [sample.host + sample.device for sample in samples]
    top = max(*values, 1)
    columns = [0] * width
    for sample, value in zip(samples, values, strict=True):
        column = min(width - 1, sample.read * width // end)
        columns[column] = max(columns[column], value)
    for column in range(1, width):
        # A bucket without a sample holds what the one before it held.
        columns[column] = columns[column] or columns[column - 1]
    lines = []
    for row in range(height, 0, -1):
        level = top * row / height
        cells = "".join("█" if v >= level - top / height / 2 else " " for v in columns)
        label = f"{level / 1e6:10.1f} MB" if row in (height, height // 2, 1) else " " * 13
        lines.append(f"{label} |{cells}")
    lines.append(" " * 14 + "+" + "-" * width)
    lines.append(f"{'':14} 0{'bytes read':^{width - 12}}{end / 1e6:10.1f} MB")
    return "\n".join(lines)
