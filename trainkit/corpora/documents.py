"""What a document of tokens must be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from trainkit.types import DataError, Sample

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def smallest_dtype(vocab_size: int | None) -> np.dtype[Any]:
    """Return the smallest dtype that holds a vocabulary's tokens; uint32 if it is unknown."""
    return np.dtype("uint32" if vocab_size is None else np.min_scalar_type(max(vocab_size - 1, 0)))


def checked_document(
    document: ArrayLike | Sample, limit: int, where: str, *, with_choice: bool | None = None
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
    """Return a document's ids `[N]`, and for a `Sample` which are trained on, uint8 `[N]`.

    Args:
        document: Ids or a `Sample`.
        limit: No token may be this large or larger.
        where: Which document of which function this is.
        with_choice: Whether those before it were `Sample`s; None for the first.

    Raises:
        DataError: It is not what it must be.
    """
    is_sample = isinstance(document, Sample)
    if with_choice is not None and is_sample != with_choice:
        raise DataError(
            f"{where} is {'a' if is_sample else 'no'} Sample, unlike those before it: "
            "all documents of a corpus say which tokens are trained on, or none does",
            where=where,
        )
    ids = np.asarray(document.tokens if is_sample else document)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise DataError(
            f"{where} must be integers in one dimension, got {ids.dtype} {ids.shape}", where=where
        )
    if ids.size and (ids.min() < 0 or ids.max() >= limit):
        worst = int(((ids < 0) | (ids >= limit)).argmax())
        raise DataError(
            f"{where} has token {ids[worst]} at {worst}, outside [0, {limit})",
            where=where,
            got=int(ids[worst]),
        )
    if not is_sample:
        return ids, None
    trained = np.asarray(document.trained)
    if trained.dtype != np.bool_ or trained.shape != ids.shape:
        raise DataError(
            f"{where}: `trained` must be bool {ids.shape}, like its tokens, "
            f"got {trained.dtype} {trained.shape}",
            where=where,
        )
    return ids, trained.view(np.uint8)
