"""Facts about this machine and its Python, gathered once; `doctor` judges them."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from importlib import metadata

import torch
import torch.distributed as dist

# Distributions whose versions decide something; several names where forks rename them.
PACKAGES: dict[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "triton": ("triton",),
    "fla": ("fla-core", "flash-linear-attention"),
    "flash_kda": ("flash_kda", "flash-kda"),
    "humming": ("humming-kernels",),
    "deep_ep": ("deep_ep", "deep-ep", "tokenspeed-deepep"),
    "nvshmem": ("nvshmem4py-cu13", "nvshmem4py-cu12"),
    "mooncake": (
        "mooncake-transfer-engine",
        "mooncake-transfer-engine-non-cuda",
        "mooncake-transfer-engine-musa",
    ),
    "torch_musa": ("torch_musa", "torch-musa"),
    "mate": ("mate",),
    "sglang": ("sglang",),
    "torchada": ("torchada",),
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What was found.

    Attributes:
        platform: "cuda", "musa", another accelerator's type, or "cpu".
        device_names: one a device.
        free_bytes: free memory of each device, or the host's for "cpu".
        peer_access: [devices][devices], None where nothing can tell.
        links: link of each pair of GPUs as nvidia-smi names it ("NV18"), where it is there.
        versions: of PACKAGES, None where a package is missing.
        modules: of PACKAGES' import names, whether they can be found.
        transports: torch.distributed backends that this torch knows.
        cores: of the host that this process may use.
        open_files: limit of open files; None where it cannot be read.
    """

    platform: str
    device_names: tuple[str, ...] = ()
    free_bytes: tuple[int, ...] = ()
    peer_access: tuple[tuple[bool, ...], ...] | None = None
    links: tuple[str, ...] = ()
    versions: dict[str, str | None] = field(default_factory=dict)
    modules: dict[str, bool] = field(default_factory=dict)
    transports: tuple[str, ...] = ()
    cores: int = 1
    open_files: int | None = None

    @property
    def num_devices(self) -> int:
        """Accelerators; 0 on a CPU."""
        return 0 if self.platform == "cpu" else len(self.device_names)

    def version(self, name: str) -> tuple[int, ...] | None:
        """Leading numbers of a package's version: "0.2.5+musa" is (0, 2, 5)."""
        text = self.versions.get(name)
        return None if text is None else version_numbers(text)


def version_numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def detect() -> Machine:
    """Look around. Starts no device context beyond what a memory query needs."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    platform = accelerator.type if accelerator is not None else "cpu"
    # torch_musa may stand in for CUDA; then torch.version says so.
    if platform == "cuda" and getattr(torch.version, "musa", None):
        platform = "musa"
    count = torch.accelerator.device_count() if accelerator is not None else 0
    names: tuple[str, ...] = tuple(f"{platform}:{index}" for index in range(count))
    free: tuple[int, ...] = (_host_free_bytes(),)
    peers: tuple[tuple[bool, ...], ...] | None = None
    if platform == "cuda":
        names = tuple(torch.cuda.get_device_name(index) for index in range(count))
        free = tuple(torch.cuda.mem_get_info(index)[0] for index in range(count))
        peers = tuple(
            tuple(a == b or torch.cuda.can_device_access_peer(a, b) for b in range(count))
            for a in range(count)
        )
    return Machine(
        platform=platform,
        device_names=names,
        free_bytes=free,
        peer_access=peers,
        links=_nvidia_links(),
        versions={name: _version(candidates) for name, candidates in PACKAGES.items()},
        modules={name: _findable(name) for name in PACKAGES},
        transports=tuple(
            name
            for name in dist.Backend.backend_list
            if name not in ("undefined", "fake") and dist.is_backend_available(name)
        ),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        open_files=_open_files(),
    )


def _version(distributions: tuple[str, ...]) -> str | None:
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _findable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _host_free_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (OSError, ValueError):
        return 0


def _open_files() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _nvidia_links() -> tuple[str, ...]:
    """Links between pairs of GPUs out of `nvidia-smi topo -m`: NV18, PIX, SYS, ..."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    try:
        done = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = []
    for line in done.stdout.splitlines():
        if re.match(r"GPU\d+\s", line):
            found += re.findall(r"\b(NV\d+|PIX|PXB|PHB|NODE|SYS)\b", line)
    return tuple(dict.fromkeys(found))
