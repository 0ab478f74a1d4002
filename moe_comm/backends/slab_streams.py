"""Streams of a slab: the order of its calls, and the stream of its copies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_comm.backends.slab_places import SlabPlaces


class SlabStreams(SlabPlaces):
    """Counters, flags and working memory are common to all slots, so everything that reads or
    writes them runs in one order: that of the calls."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        on_cuda = self.device.type == "cuda"
        # Its launches go before programs of the calls' stream that wait for a place.
        self._side = torch.cuda.Stream(self.device, priority=-1) if on_cuda else None
        # The stream of the last call, and its handle, which is cheaper to compare.
        self._last_stream: torch.cuda.Stream | None = None
        self._last_handle = -1
        # Recorded anew at each fork and join: making one takes longer than all the rest.
        self._mark = torch.cuda.Event() if on_cuda else None

    def _follow(self) -> None:
        """Put what comes now behind the last call, where that was on another stream. Streams that
        are being captured are ordered by whoever captures them."""
        if self._side is None:
            return
        handle = torch._C._cuda_getCurrentRawStream(self._side.device_index)
        if handle == self._last_handle:
            return
        here, last = torch.cuda.current_stream(self.device), self._last_stream
        self._last_stream, self._last_handle = here, handle
        if last is not None and not torch.cuda.is_current_stream_capturing():
            with torch.cuda.stream(last):
                captured = torch.cuda.is_current_stream_capturing()
            if not captured:
                here.wait_stream(last)

    def _synchronize(self) -> None:
        if self._side is not None:
            torch.cuda.synchronize(self.device)

    def _fork(self) -> None:
        """The side stream goes on from here: the stream of this call, which _follow has noted."""
        self._order(self._last_stream, self._side)

    def _join(self) -> None:
        """The stream of this call goes on after the side stream."""
        self._order(self._side, self._last_stream)

    def _order(self, first: torch.cuda.Stream | None, then: torch.cuda.Stream | None) -> None:
        if first is not None and then is not None and self._mark is not None:
            self._mark.record(first)
            then.wait_event(self._mark)

    def _used_here(self, sent_on: int, *tensors: Tensor | None) -> None:
        """In a receive half: these tensors of the send half, which ran on the stream of handle
        `sent_on`, are read here too, or on the side stream, which has been joined here. Where here
        is another stream, freeing them must not give their memory away before."""
        if self._last_stream is not None and sent_on != self._last_handle:
            for tensor in tensors:
                if tensor is not None:
                    tensor.record_stream(self._last_stream)
