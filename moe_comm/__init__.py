"""Expert-parallel dispatch and combine for very sparse Mixture-of-Experts models."""

from __future__ import annotations

__version__ = "0.1.0"
