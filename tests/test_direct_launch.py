"""Launch: which arguments reach Triton's compiled launcher, and when it is used. What runs behind
it needs a GPU; here a stand-in takes its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_comm.backends.direct_launch import Launch


class Compiled:
    """What Triton returns of a launch."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, scratch: int) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.run = self
        self.global_scratch_size, self.profile_scratch_size = scratch, 0
        self.launch_cooperative_grid, self.launch_pdl = False, True

    def launch(self, *args: Any) -> None:
        self.calls.append(args)

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *args: self.calls.append((grid, *args))


class Kernel:
    """A Triton kernel of three arguments and two constants."""

    arg_names, params = ["a_ptr", "n", "b_ptr", "K", "FORM"], ()

    def __init__(self, scratch: int = 0) -> None:
        self.compiled, self.calls = Compiled(scratch), []

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        def launch(*args: Any, **options: Any) -> Compiled:
            self.calls.append((grid, args, options))
            return self.compiled

        return launch


@pytest.fixture(autouse=True)
def a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda device: 100 + device, raising=False
    )


OPTIONS = {"FORM": True, "K": 4, "num_warps": 8}


def test_from_the_second_call_on_addresses_reach_the_launcher():
    triton = pytest.importorskip("triton")
    kernel, fixed, given = Kernel(), torch.zeros(8), torch.zeros(64)
    launch = Launch(kernel, OPTIONS, b_ptr=fixed)
    launch((5, 2), given, 1)
    assert kernel.calls == [((5, 2), (given, 1, fixed), OPTIONS)]
    launch((6, 1), given, 7)
    direct = (
        6, 1, 1, 103, "function", False, True, None, None, "metadata", None, None, None,
        given.data_ptr(), 7, fixed.data_ptr(), 4, True,
    )  # fmt: skip
    if triton.__version__.startswith("3.6."):
        assert kernel.compiled.calls == [direct]
    else:
        assert kernel.compiled.calls == [
            ((6, 1, 1), given.data_ptr(), 7, fixed.data_ptr(), 4, True)
        ]
    assert len(kernel.calls) == 1


@pytest.mark.parametrize("first", [False, True])
def test_unaligned_addresses_take_tritons_own_way(first):
    kernel, given = Kernel(), torch.zeros(64)
    launch = Launch(kernel, OPTIONS, b_ptr=torch.zeros(8))
    launch((5, 1), given[1:] if first else given, 1)
    launch((5, 1), given[1:], 1)
    assert len(kernel.calls) == 2
    assert not kernel.compiled.calls


def test_a_kernel_that_wants_scratch_memory_is_launched_by_what_gives_it_some():
    kernel, fixed, given = Kernel(scratch=64), torch.zeros(8), torch.zeros(64)
    launch = Launch(kernel, OPTIONS, b_ptr=fixed)
    for _ in range(2):
        launch((5, 1), given, 7)
    assert len(kernel.calls) == 1
    assert kernel.compiled.calls == [((5, 1, 1), given.data_ptr(), 7, fixed.data_ptr(), 4, True)]


def test_a_missing_argument_is_refused():
    launch = Launch(Kernel(), OPTIONS, b_ptr=torch.zeros(8))
    with pytest.raises(ValueError, match="zip"):
        launch((5, 1), torch.zeros(64))
