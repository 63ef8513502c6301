"""Checks of a document of tokens, and of the columns that a corpus declares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from trainkit.types import BATCH_TENSORS, EXTRA_TENSORS, DataError, Sample

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import ArrayLike

    from trainkit.types import Column

_RESERVED_NAMES = (*BATCH_TENSORS, "spans", *EXTRA_TENSORS)


@attrs.frozen(eq=False)
class Document:
    """A checked document: its ids, its loss mask and its columns.

    Attributes:
        ids: Integers `[N]`.
        loss_mask: The loss mask, uint8 `[N]`: 0 for tokens that are never labels. None if all are.
        values: The values of each column, `[N]` or `[N, k]`, by name.
    """

    ids: np.ndarray[Any, Any]
    loss_mask: np.ndarray[Any, Any] | None
    values: Mapping[str, np.ndarray[Any, Any]]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> Document:
        """Return a slice of the document, as views."""
        return Document(
            self.ids[part],
            None if self.loss_mask is None else self.loss_mask[part],
            {name: x[part] for name, x in self.values.items()},
        )


def smallest_dtype(vocab_size: int | None) -> np.dtype[Any]:
    """Return the smallest unsigned dtype that fits a vocabulary; uint32 if it is unknown."""
    if vocab_size is None:
        return np.dtype("uint32")
    # The dtype must hold the largest id, which is one below the size.
    return np.min_scalar_type(max(vocab_size - 1, 0))


def check_columns(function: str, columns: Mapping[str, Column] | None) -> dict[str, Column]:
    """Check the names of a corpus' columns, and return the columns sorted by name.

    Raises:
        ValueError: A name is empty, or is that of a tensor of every batch.

    Examples:
        >>> from trainkit.types import Column
        >>> check_columns("make_corpus", {"labels": Column()})
        Traceback (most recent call last):
        ...
        ValueError: make_corpus: no column can be called 'labels': a batch has its own
    """
    for name in columns or {}:
        if not isinstance(name, str) or not name or name in _RESERVED_NAMES:
            raise ValueError(f"{function}: no column can be called {name!r}: a batch has its own")
    # The hash of a token file covers the order of its columns, which must not depend on the caller.
    return dict(sorted((columns or {}).items()))


def check_document(
    document: ArrayLike | Sample,
    limit: int,
    origin: str,
    *,
    columns: Mapping[str, Column],
    has_mask: bool | None = None,
) -> Document:
    """Check a document of ids or a `Sample`, and return it as arrays.

    Args:
        document: Ids or a `Sample`.
        limit: Exclusive upper bound of the ids.
        origin: The function and the document, such as "make_corpus: document 3", for messages.
        columns: The columns that the document must have.
        has_mask: Whether the documents before it were `Sample`s; None for the first.

    Raises:
        DataError: The ids, the loss mask or the columns are wrong.
    """
    is_sample = isinstance(document, Sample)
    # A corpus stores the mask of all its tokens or none, so its documents must agree.
    if has_mask is not None and is_sample != has_mask:
        raise DataError(
            f"{origin} is {'a' if is_sample else 'no'} Sample, unlike those before it: "
            "either all documents of a corpus have a loss mask, or none has",
            where=origin,
        )
    ids = _check_ids(document.tokens if is_sample else document, limit, origin)
    actual = (document.columns if is_sample else None) or {}
    if actual.keys() != columns.keys():
        raise DataError(
            f"{origin} has the columns {_format_names(actual)}; "
            f"its corpus has {_format_names(columns)}: declare the same `columns` for the corpus "
            "and give each document values for them",
            where=origin,
            got=_format_names(actual),
        )
    values = {
        name: _check_values(actual[name], column, len(ids), f"{origin}: {name}")
        for name, column in columns.items()
    }
    if not is_sample:
        return Document(ids, None, values)
    loss_mask = np.asarray(document.loss_mask)
    if loss_mask.dtype != np.bool_ or loss_mask.shape != ids.shape:
        raise DataError(
            f"{origin}: `loss_mask` must be bool {ids.shape}, like its tokens, "
            f"got {loss_mask.dtype} {loss_mask.shape}",
            where=origin,
        )
    # Booleans are stored as bytes of 0 and 1, so a view will do.
    return Document(ids, loss_mask.view(np.uint8), values)


def _check_ids(given: ArrayLike, limit: int, origin: str) -> np.ndarray[Any, Any]:
    ids = np.asarray(given)
    # An empty list becomes an array of float64, so the dtype of no ids is not checked.
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise DataError(
            f"{origin} must be integers in one dimension, got {ids.dtype} {ids.shape}",
            where=origin,
        )
    # Two passes without temporary memory; the mask of wrong ids is made only for the error.
    if ids.size and (ids.min() < 0 or ids.max() >= limit):
        worst = int(((ids < 0) | (ids >= limit)).argmax())
        raise DataError(
            f"{origin} has token {ids[worst]} at {worst}, outside [0, {limit})",
            where=origin,
            got=int(ids[worst]),
        )
    return ids


def _format_names(columns: Mapping[str, Any]) -> str:
    return ", ".join(sorted(columns)) or "none"


def _check_values(
    given: ArrayLike, column: Column, length: int, origin: str
) -> np.ndarray[Any, Any]:
    """Return a document's values of a column, in the column's dtype."""
    shape = (length, *column.inner)
    dtype = np.dtype(column.dtype)
    try:
        values = np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged, or on a device
        raise DataError(
            f"{origin} is no array of {dtype} {shape}: {error}", where=origin
        ) from error
    # An empty list becomes an array of float64 `(0,)`, whatever the column's dtype and shape.
    if not length and not values.size:
        return np.empty(shape, dtype)
    # Integers may become floats, but floats never integers.
    if values.shape != shape or values.dtype.kind not in ("iuf" if dtype.kind == "f" else "iu"):
        raise DataError(
            f"{origin} must be {dtype} {shape}, for {length} tokens, "
            f"got {values.dtype} {values.shape}",
            where=origin,
            got=f"{values.dtype} {values.shape}",
        )
    # Integers must survive the cast unchanged; floats may round, but neither overflow nor be NaN.
    with np.errstate(over="ignore"):
        converted = values.astype(dtype)
    fits = np.isfinite(converted) if dtype.kind == "f" else converted == values
    if not fits.all():
        worst = int(fits.reshape(length, -1).all(axis=1).argmin())
        raise DataError(
            f"{origin} at token {worst} is {values[worst].tolist()}, "
            f"which does not fit a column of {dtype}",
            where=origin,
            got=values[worst].tolist(),
        )
    return converted
