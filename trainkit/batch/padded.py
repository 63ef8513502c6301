"""Padded batches, for samples that trainkit did not pack: shift labels, pad rows, pool tokens."""

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
"""Fields of a sample that belong to the predicted token, not to the input token."""


def shift_tokens(
    sample: Mapping[str, Any],
    *,
    mode: Literal["auto", "always"] = "auto",
    targets: Collection[str] = TARGET_FIELDS,
) -> dict[str, Any]:
    """Shift the labels of a sample, and all fields that belong to targets, by one token.

    Use it on one document from elsewhere before it becomes part of a row. `labels[i]` then is the
    token that the model predicts after `input_ids[i]`: inputs lose their last entry, targets their
    first.

    With "auto" a sample that is already shifted is returned unchanged. This is one whose labels and
    inputs differ in number, one that has `target_tokens`, or one whose labels show it. The first
    label decides that is not ignored and whose token differs from the next one (in a run of equal
    tokens both readings give the same labels). If it equals its own token, the sample is shifted
    now. Otherwise, or without such a label, the sample is returned unchanged.

    Args:
        sample: `input_ids` and `labels`, int64 `[S]` on the host, and any other fields. A tensor
            whose dimension 0 is S has one entry per token; all other fields stay the same.
        mode: "auto", or "always" for a sample that is known not to be shifted.
        targets: The fields that shift with the labels. Other fields per token (`attention_mask`,
            `document_ids`, ...) go with the inputs; `position_ids` count from 0 again.

    Returns:
        The sample, in a new dict; tensors are views. A shifted one has S - 1 tokens.

    Raises:
        ValueError: A field is missing or not as above, a target does not have one entry per token,
            or the mode is "always" for a sample that must be shifted already.

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
        # Made anew: the last position has no target, and the first must be 0.
        elif name == "position_ids" and len(value) == length:
            shifted[name] = torch.arange(max(length - 1, 0), device=value.device)
        elif name == "labels" or name in targets:
            if len(value) != length:
                raise ValueError(
                    f"shift_tokens: {name} must have one entry for each of the {length} tokens, or "
                    f"be a scalar, got {tuple(value.shape)}"
                )
            shifted[name] = value[1:]
        else:
            # What has one entry for each token goes with the inputs, which lose their last.
            shifted[name] = value[:-1] if len(value) == length else value
    return shifted


def _needs_shift(sample: Mapping[str, Any], mode: str) -> bool:
    if "target_tokens" in sample and mode == "auto":
        return False
    for name in ("input_ids", "labels"):
        value = sample.get(name)
        if not isinstance(value, torch.Tensor) or value.ndim != 1:
            got = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(f"shift_tokens: {name} must be a tensor [S], got {got}")
    input_ids = sample["input_ids"]
    labels = sample["labels"]
    if mode == "always" and ("target_tokens" in sample or len(input_ids) != len(labels)):
        raise ValueError(
            f"shift_tokens: {len(input_ids)} input_ids, {len(labels)} labels"
            f"{' and target_tokens' if 'target_tokens' in sample else ''}: these are shifted "
            'already; use mode="auto"'
        )
    if mode == "always":
        return True
    if len(input_ids) != len(labels):
        return False
    # The last token has no next one to compare its label with.
    token = input_ids[:-1]
    label = labels[:-1]
    # Where a token is followed by another one, a label equal to the token itself is not shifted
    # yet; one equal to the next token is. The first such place decides.
    decides = ((label != IGNORED_LABEL) & (token != input_ids[1:])).nonzero()
    return len(decides) > 0 and bool(label[decides[0]] == token[decides[0]])


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
        value: The padding: the id of a pad token, -100 for labels, 0 for a mask.
        side: The side of the padding: "right", or "left" for generation.
        multiple_of: The width is rounded up to a multiple of this.

    Returns:
        `[B, width]`, of the rows' dtype; gradients flow to the rows.

    Raises:
        ValueError: The rows are not as above, the dtype cannot hold `value`, or an argument is out
            of its range.

    Examples:
        >>> rows = [torch.tensor([1, 2, 3]), torch.tensor([4])]
        >>> pad_stack(rows, 0, multiple_of=4).tolist()
        [[1, 2, 3, 0], [4, 0, 0, 0]]
        >>> pad_stack(rows, -100, side="left").tolist()
        [[1, 2, 3], [-100, -100, 4]]

    Packed rows waste next to nothing instead: `collate_bins`.
    """
    if len(rows) == 0:
        raise ValueError("pad_stack: there must be at least one row")
    first = rows[0]
    for i, row in enumerate(rows):
        if row.ndim != 1 or row.dtype != first.dtype or row.device != first.device:
            raise ValueError(
                "pad_stack: rows must be [S] of one dtype on one device; row 0 is "
                f"{tuple(first.shape)} {first.dtype} on {first.device}, row {i} is "
                f"{tuple(row.shape)} {row.dtype} on {row.device}"
            )
    dtype = first.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        # `iinfo` does not take bool.
        low, high = 0, 1
        if dtype != torch.bool:
            low = torch.iinfo(dtype).min
            high = torch.iinfo(dtype).max
        if not math.isfinite(value) or value != int(value) or not low <= value <= high:
            raise ValueError(f"pad_stack: rows of {dtype} cannot be padded with {value}")
    check_choice(("left", "right"), "pad_stack", side=side)
    check_range("pad_stack", at_least=1, multiple_of=multiple_of)
    width = -(-max(len(row) for row in rows) // multiple_of) * multiple_of
    gaps = [width - len(row) for row in rows]
    # In the order of `functional.pad`: before, after.
    pads = [(gap, 0) if side == "left" else (0, gap) for gap in gaps]
    return torch.stack(
        [functional.pad(row, pad, value=value) for row, pad in zip(rows, pads, strict=True)]
    )


def pooling_mask(mask: Tensor, kind: Literal["first", "last", "all"]) -> Tensor:
    """Return a mask of the tokens that are pooled into the embedding of each row.

    Args:
        mask: `[..., S]`, 1 or True for tokens, 0 or False for padding.
        kind: "first" selects the first column, for models with a class token there: padding must be
            on the right. "last" selects the last token, with padding on either side, for causal
            models. "all" selects every token, for a mean.

    Returns:
        int64 `[..., S]`, 1 for pooled tokens, in new memory, without a host sync. A row without
        tokens has no last one.

    Raises:
        ValueError: `kind` is none of these, or `mask` is a scalar.

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
        # A slice, as a row may have no column.
        first[..., :1] = 1
        return first
    # The last token is the one with a single token from itself to the end of the row.
    num_left = tokens.flip(-1).cumsum(-1).flip(-1)
    return tokens * (num_left == 1)
