"""SHA-256 of every tensor's raw bytes, kept beside a checkpoint's files.

File `moe_comm.manifest.json`:
  {"schema": 1, "algorithm": "sha256", "root": hex,
   "files": {file: {tensor: {"dtype": str, "shape": [int], "sha256": hex}}}}
`root` is the SHA-256 of the lines "file tensor dtype shape sha256", sorted, so that one value
stands for the whole checkpoint and a manifest that was edited or cut is noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_comm.errors import WrongDataError
from moe_comm.model.weights.safetensors_file import CheckpointError, TensorEntry

MANIFEST_NAME = "moe_comm.manifest.json"


class HashMismatchError(WrongDataError):
    """A tensor's bytes are not the ones its manifest was made of.

    Attributes: `file`, `tensor`, `expected` and `got` (hexadecimal SHA-256).
    """

    def __init__(self, file: Path, tensor: str, expected: str, got: str) -> None:
        super().__init__(
            f"{file}: tensor {tensor}: SHA-256 differs: expected {expected}, got {got}"
        )
        self.file, self.tensor, self.expected, self.got = file, tensor, expected, got


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """(file name, tensor) -> (dtype, shape, SHA-256)."""

    tensors: Mapping[tuple[str, str], tuple[str, tuple[int, ...], str]]

    @classmethod
    def load(cls, directory: Path) -> Manifest | None:
        """The manifest in `directory`; None where there is none."""
        path = directory / MANIFEST_NAME
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        try:
            data = json.loads(text)
            if data["schema"] != 1 or data["algorithm"] != "sha256":
                raise CheckpointError(path, None, "expected schema 1 and algorithm sha256")
            tensors = {
                (file, name): (str(t["dtype"]), tuple(t["shape"]), str(t["sha256"]))
                for file, listed in data["files"].items()
                for name, t in listed.items()
            }
            root = str(data["root"])
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(path, None, f"malformed manifest: {error!r}") from error
        manifest = cls(tensors=tensors)
        if manifest.root() != root:
            raise CheckpointError(
                path, None, f"root differs: expected {root}, its entries give {manifest.root()}"
            )
        return manifest

    def root(self) -> str:
        """One hash for the whole: see the module's docstring."""
        lines = sorted(
            f"{file} {name} {dtype} {list(shape)} {digest}\n"
            for (file, name), (dtype, shape, digest) in self.tensors.items()
        )
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def expected(self, entry: TensorEntry) -> str:
        """The hash that `entry` must have. CheckpointError where the manifest does not know it or
        knows another dtype or shape."""
        found = self.tensors.get((entry.file.name, entry.name))
        if found is None:
            raise CheckpointError(entry.file, entry.name, f"not listed in {MANIFEST_NAME}")
        dtype, shape, digest = found
        if (dtype, shape) != (entry.dtype, entry.shape):
            raise CheckpointError(
                entry.file,
                entry.name,
                f"expected {dtype} {list(shape)} by {MANIFEST_NAME}, got {entry.dtype} "
                f"{list(entry.shape)}",
            )
        return digest

    def check_complete(self, directory: Path, names: set[tuple[str, str]]) -> None:
        """CheckpointError for the first tensor that the manifest lists and the files lack."""
        missing = sorted(set(self.tensors) - names)
        if missing:
            file, name = missing[0]
            raise CheckpointError(directory / file, name, f"missing: listed in {MANIFEST_NAME}")

    def save(self, directory: Path, *, force: bool = False) -> Path:
        """Write the manifest: the only file this package ever writes into a checkpoint. FileExists-
        Error where there is one, unless `force`. Readers never see half of it."""
        path = directory / MANIFEST_NAME
        if path.exists() and not force:
            raise FileExistsError(f"{path}: a manifest exists; force overwrites it")
        files: dict[str, dict[str, Any]] = {}
        for (file, name), (dtype, shape, digest) in sorted(self.tensors.items()):
            files.setdefault(file, {})[name] = {
                "dtype": dtype,
                "shape": list(shape),
                "sha256": digest,
            }
        data = {"schema": 1, "algorithm": "sha256", "root": self.root(), "files": files}
        partial = path.with_name(f".{MANIFEST_NAME}.{os.getpid()}")
        try:
            partial.write_text(json.dumps(data), encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        return path


@dataclass(kw_only=True)
class HashBook:
    """Hashes tensors as they pass: compares with a manifest where there is one, and remembers
    what a new manifest needs. `enabled=False` hashes nothing."""

    manifest: Manifest | None
    record: bool = False
    enabled: bool = True
    seen: dict[tuple[str, str], tuple[str, tuple[int, ...], str]] = field(default_factory=dict)

    @property
    def active(self) -> bool:
        """Whether bytes have to be hashed at all."""
        return self.enabled and (self.record or self.manifest is not None)

    def settle(self, entry: TensorEntry, digest: str) -> None:
        """Compare and record one tensor's hash. Thread-safe: each tensor is its own key."""
        if self.manifest is not None:
            wanted = self.manifest.expected(entry)
            if wanted != digest:
                raise HashMismatchError(entry.file, entry.name, wanted, digest)
        if self.record:
            self.seen[(entry.file.name, entry.name)] = (entry.dtype, entry.shape, digest)
