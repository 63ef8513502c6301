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

    def wrong(what: str, got: int | None = None) -> DataError:
        return DataError(f"{where}{what}", where=where, got=got)

    is_sample = isinstance(document, Sample)
    if with_choice is not None and is_sample != with_choice:
        what = f" is {'a' if is_sample else 'no'} Sample, unlike those before it"
        must = "all documents of a corpus say which tokens are trained on, or none does"
        raise wrong(f"{what}: {must}")
    ids = np.asarray(document.tokens if is_sample else document)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise wrong(f" must be integers in one dimension, got {ids.dtype} {ids.shape}")
    if ids.size and (ids.min() < 0 or ids.max() >= limit):
        worst = int(((ids < 0) | (ids >= limit)).argmax())
        got = int(ids[worst])
        raise wrong(f" has token {got} at {worst}, outside [0, {limit})", got)
    if not is_sample:
        return ids, None
    trained = np.asarray(document.trained)
    if trained.dtype != np.bool_ or trained.shape != ids.shape:
        got = f"{trained.dtype} {trained.shape}"
        raise wrong(f": `trained` must be bool {ids.shape}, like its tokens, got {got}")
    return ids, trained.view(np.uint8)
