"""Samples that were not packed by trainkit: shift their labels, pad them, say what to pool."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn import functional

from trainkit.types import IGNORED_LABEL, check_choice, check_range

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor

TARGET_FIELDS = ("weights", "advantages", "logprobs", "temperature", "top_k", "top_p", "min_p")
"""Fields of a sample that belong to the token that is predicted, not to the one that is read."""


def shift_tokens(
    sample: Mapping[str, Any],
    *,
    mode: Literal["auto", "always"] = "auto",
    targets: Collection[str] = TARGET_FIELDS,
) -> dict[str, Any]:
    """Return a sample whose labels are shifted, and with them all that belongs to a target.

    For one document from elsewhere, before it is put into a row. `labels[i]` is then what the model
    shall say after `input_ids[i]`: inputs lose their last entry, targets their first.

    With "auto" a sample that is shifted already comes back as it is. That is one whose labels and
    inputs differ in number, one that has `target_tokens`, or one whose labels say so: the first
    label that tells is looked at, which is one that is not ignored, and whose token differs from
    the next (in a run of one token both readings give the same labels). It is the next token: the
    sample is shifted. It is its own token: it is not. It is neither, or no label tells: the sample
    is left as it is.

    Args:
        sample: `input_ids` and `labels`, int64 `[S]` on the host, and any other fields. A tensor
            whose dimension 0 is S has one entry per token; all else is left as it is.
        mode: "auto", or "always": the sample is known not to be shifted.
        targets: Which fields shift with the labels. Other fields per token (`attention_mask`,
            `document_ids`, ...) go with the inputs; `position_ids` are made anew from 0.

    Returns:
        The sample, in a new dict; tensors are views. A shifted one has S - 1 tokens.

    Raises:
        ValueError: A field is missing or not as above, a target has a number of entries of its own,
            or "always" is asked of a sample that can only be shifted already.

    Examples:
        >>> tokens = torch.tensor([5, 6, 7])
        >>> sample = {"input_ids": tokens, "labels": tokens, "weights": torch.tensor([0, 1, 2])}
        >>> shifted = shift_tokens(sample)
        >>> {name: x.tolist() for name, x in shifted.items()}
        {'input_ids': [5, 6], 'labels': [6, 7], 'weights': [1, 2]}
        >>> shift_tokens(shifted)["labels"]
        tensor([6, 7])

    The idea is xorl's, which trusts the first label even where it repeats the token before.
    """
    check_choice(("auto", "always"), "shift_tokens", mode=mode)
    if not _needs_shift(sample, mode):
        return dict(sample)
    length = len(sample["input_ids"])
    shifted = {}
    for name, value in sample.items():
        if not isinstance(value, torch.Tensor) or value.ndim == 0:
            shifted[name] = value
        elif name == "position_ids" and len(value) == length:
            shifted[name] = torch.arange(max(length - 1, 0), device=value.device)
        elif name == "labels" or name in targets:
            if len(value) != length:
                must = f"must have one entry for each of the {length} tokens, or be a scalar"
                raise ValueError(f"shift_tokens: {name} {must}, got {tuple(value.shape)}")
            shifted[name] = value[1:]
        else:
            shifted[name] = value[:-1] if len(value) == length else value
    return shifted


def _needs_shift(sample: Mapping[str, Any], mode: str) -> bool:
    if "target_tokens" in sample and mode == "auto":
        return False
    input_ids, labels = (_tokens(sample, name) for name in ("input_ids", "labels"))
    if mode == "always" and ("target_tokens" in sample or len(input_ids) != len(labels)):
        targets = " and target_tokens" if "target_tokens" in sample else ""
        what = f"{len(input_ids)} input_ids, {len(labels)} labels{targets}"
        raise ValueError(f'shift_tokens: {what}: these are shifted already; ask for mode="auto"')
    if mode == "always":
        return True
    if len(input_ids) != len(labels):
        return False
    here, following, wanted = input_ids[:-1], input_ids[1:], labels[:-1]
    telling = ((wanted != IGNORED_LABEL) & (here != following)).nonzero()
    return len(telling) > 0 and bool(wanted[telling[0]] == here[telling[0]])


def _tokens(sample: Mapping[str, Any], name: str) -> Tensor:
    value = sample.get(name)
    if isinstance(value, torch.Tensor) and value.ndim == 1:
        return value
    found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    raise ValueError(f"shift_tokens: {name} must be a tensor [S], got {found}")


def pad_stack(
    rows: Sequence[Tensor],
    value: float,
    *,
    side: Literal["left", "right"] = "right",
    multiple_of: int = 1,
) -> Tensor:
    """Stack rows of different lengths, padded to the longest.

    Args:
        rows: At least one tensor `[S]`, all of one dtype on one device.
        value: The padding: a pad token's id for tokens, -100 for labels, 0 for a mask.
        side: Where the padding goes: "right", or "left" for generation.
        multiple_of: The width is the next multiple of this.

    Returns:
        `[B, width]`, of the rows' dtype; gradients reach the rows.

    Raises:
        ValueError: The rows are not as above, the dtype cannot hold `value`, or an argument is out
            of its range.

    Examples:
        >>> rows = [torch.tensor([1, 2, 3]), torch.tensor([4])]
        >>> pad_stack(rows, 0, multiple_of=4).tolist()
        [[1, 2, 3, 0], [4, 0, 0, 0]]
        >>> pad_stack(rows, -100, side="left").tolist()
        [[1, 2, 3], [-100, -100, 4]]

    Rows that are packed instead waste next to nothing: `collate_bins`.
    """
    _check_rows(rows, value)
    check_choice(("left", "right"), "pad_stack", side=side)
    check_range("pad_stack", at_least=1, multiple_of=multiple_of)
    width = -(-max(len(row) for row in rows) // multiple_of) * multiple_of
    gaps = [width - len(row) for row in rows]
    pads = [(gap, 0) if side == "left" else (0, gap) for gap in gaps]
    return torch.stack(
        [functional.pad(row, pad, value=value) for row, pad in zip(rows, pads, strict=True)]
    )


def _check_rows(rows: Sequence[Tensor], value: float) -> None:
    if len(rows) == 0:
        raise ValueError("pad_stack: there must be at least one row")
    kinds = [(row.ndim, row.dtype, row.device) for row in rows]
    wrong = next((i for i, kind in enumerate(kinds) if kind != (1, *kinds[0][1:])), None)
    if wrong is not None:
        kinds = [(i, rows[i]) for i in (0, wrong)]
        got = [f"row {i} is {tuple(row.shape)} {row.dtype} on {row.device}" for i, row in kinds]
        must = "rows must be [S] of one dtype on one device"
        raise ValueError(f"pad_stack: {must}; {', '.join(got)}")
    dtype = rows[0].dtype
    if dtype.is_floating_point or dtype.is_complex:
        return
    limits = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if not math.isfinite(value) or value != int(value) or not limits[0] <= value <= limits[1]:
        raise ValueError(f"pad_stack: rows of {dtype} cannot be padded with {value}")


def pooling_mask(mask: Tensor, kind: Literal["first", "last", "all"]) -> Tensor:
    """Return which tokens of each row its summary is made of: 1 for those, 0 for the others.

    Args:
        mask: `[..., S]`, 1 or True for tokens, 0 or False for padding.
        kind: "first" takes the first place, for models that read a class token there: padding must
            be on the right. "last" takes the last token, whichever side the padding is on, for
            causal models. "all" takes every token, for a mean.

    Returns:
        int64 `[..., S]`, in new memory, without a host sync. A row without tokens has no last one.

    Raises:
        ValueError: `kind` is none of these, or `mask` has no dimension.

    Examples:
        >>> mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])
        >>> pooling_mask(mask, "last").tolist()
        [[0, 0, 1, 0], [0, 0, 0, 1]]
        >>> pooling_mask(mask[:1], "first").tolist()
        [[1, 0, 0, 0]]

    The three kinds are d9d's.
    """
    check_choice(("first", "last", "all"), "pooling_mask", kind=kind)
    if mask.ndim == 0:
        raise ValueError("pooling_mask: mask must be [..., S], got a scalar")
    tokens = (mask != 0).long()
    if kind == "all":
        return tokens
    if kind == "first":
        first = torch.zeros_like(tokens)
        first[..., :1] = 1
        return first
    following = tokens.flip(-1).cumsum(-1).flip(-1)
    return tokens * (following == 1)
