"""From a difference to the semantic that most likely broke: each guess is tested on the bytes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moe_comm.model.serving.capture import Capture, Difference, layers_of
from moe_comm.model.serving.layout import StateLayout
from moe_comm.model.serving.modes import Case, Rig

UNKNOWN = "unknown: none of the known faults gives these bytes"


def diagnose(rig: Rig, case: Case, difference: Difference, want: Capture, got: Capture) -> str:
    """A sentence on what the differing tensor holds instead of the expected state.

    Cheap guesses on the bytes first; then whole prefills of other token lists, to find out whose
    state, or of which depth, it is.
    """
    expected, actual = _pick(rig.layout, difference, want), _pick(rig.layout, difference, got)
    if difference.layer is None:
        return "logits differ over equal states: the forward depends on more than its state"
    if difference.tensor == "mla":
        return _rows(rig.layout, difference, want, got)
    for guess in (_poison, _bf16, _transposed):
        found = guess(rig.layout, expected, actual)
        if found:
            return found
    if difference.tensor.startswith("conv"):
        for about_windows in (_regrouped, _short_window):
            found = about_windows(rig.layout, difference, want, got)
            if found:
                return found
    return _whose(rig, case, difference, got) or UNKNOWN


def _pick(layout: StateLayout, difference: Difference, capture: Capture) -> torch.Tensor:
    for layer, name, tensor in layers_of(layout, capture):
        if (layer, name) == (difference.layer, difference.tensor):
            return tensor
    raise AssertionError(f"no tensor {difference.tensor} in layer {difference.layer}")


# -- on the bytes ----------------------------------------------------------------------------------
def _poison(layout: StateLayout, expected: torch.Tensor, actual: torch.Tensor) -> str:
    if actual.isnan().any():
        return "freed slot: the state was read or restored where the pool had poisoned it"
    return "" if actual.any() else "empty state: rows were taken over, the state was not"


def _bf16(layout: StateLayout, expected: torch.Tensor, actual: torch.Tensor) -> str:
    rounded = expected.bfloat16().to(expected.dtype)
    if expected.dtype == torch.float32 and torch.equal(actual, rounded):
        return "bf16 snapshot: the fp32 state was rounded on the way"
    return ""


def _transposed(layout: StateLayout, expected: torch.Tensor, actual: torch.Tensor) -> str:
    if expected.dim() == 3 and torch.equal(expected.transpose(1, 2).flatten(), actual.flatten()):
        return "axis swap: the state is in [head, value, key] order"
    return ""


def _regrouped(layout: StateLayout, difference: Difference, want: Capture, got: Capture) -> str:
    """The right channels in the wrong places: q, k and v were cut as one block."""
    at = layout.kda_layer_ids.index(difference.layer or 0)

    def channels(capture: Capture) -> list[tuple[float, ...]]:
        groups = [capture.segments[f"conv.{g}"][at].float() for g in "qkv"]
        return sorted(tuple(row) for row in torch.cat(groups).tolist())

    if channels(want) == channels(got):
        return "contiguous conv slicing: channels of q, k and v are in each other's places"
    return ""


def _short_window(layout: StateLayout, difference: Difference, want: Capture, got: Capture) -> str:
    expected, actual = _pick(layout, difference, want), _pick(layout, difference, got)
    if torch.equal(expected[:, -1], actual[:, -1]):
        return "short chunk: the newest inputs are right, older ones in the window are lost"
    return ""


def _rows(layout: StateLayout, difference: Difference, want: Capture, got: Capture) -> str:
    expected, actual = _pick(layout, difference, want), _pick(layout, difference, got)
    row = actual[difference.position]
    if row.isnan().any():
        return "freed page: rows were read where the cache had poisoned them"
    if not row.any():
        return "missing rows: the state was moved without its pages"
    if sorted(map(tuple, expected.tolist())) == sorted(map(tuple, actual.tolist())):
        return "page order: the rows are those of other positions"
    return "rows differ: a page was overwritten, or its tokens were processed from a wrong state"


# -- whose state is it -----------------------------------------------------------------------------
def _whose(rig: Rig, case: Case, difference: Difference, got: Capture) -> str:
    if difference.layer != min((*rig.layout.kda_layer_ids, *rig.layout.mla_layer_ids)):
        # Only the lowest layer's state follows from the tokens alone.
        return ""
    actual = _pick(rig.layout, difference, got)
    for sentence, tokens in _suspects(rig, case, got.position):
        if tokens and torch.equal(_pick(rig.layout, difference, rig.probe(tokens)), actual):
            return sentence
    return ""


def _suspects(rig: Rig, case: Case, position: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(sentence, token list whose state would be found). Grid points and the prompt's end are where
    states are taken over; the last few tokens are where hand-offs go wrong."""
    tokens = (*case.prompt, *case.forced)
    grid = rig.layout.snapshot_grid
    prompt = len(case.prompt)
    points = sorted(
        {p for p in (*range(0, position, grid), prompt - 1, prompt) if p <= position}
        | {position - 1, position}
    )
    later = range(prompt + 1, len(tokens) + 1)
    for used in points:
        for held in sorted({*points, *range(0, prompt, grid), *later, used + 1} - {used}):
            yield _depth_sentence(held, used), (*tokens[:held], *tokens[used:position])
    for name, other in (("cousin", case.cousin), ("neighbour", case.neighbour)):
        for held in sorted({*range(grid, len(other), grid), len(other)}):
            for used in points:
                sentence = f"stale slot: another request's state ({name}, {held} tokens) at {used}"
                yield sentence, (*other[:held], *tokens[used:position])


def _depth_sentence(held: int, used: int) -> str:
    if held == 0:
        return f"empty state: tokens from {used} on were processed from zero"
    if held == used + 1:
        return f"token processed twice: token {used} is in the state already"
    return f"wrong depth: a state of {held} tokens was used as one of {used}"
