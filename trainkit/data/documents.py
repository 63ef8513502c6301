"""What a document of tokens must be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from trainkit.types import BATCH_TENSORS, EXTRA_TENSORS, DataError, Sample

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import ArrayLike

    from trainkit.types import Column

_TAKEN = (*BATCH_TENSORS, "spans", *EXTRA_TENSORS)


@attrs.frozen(eq=False)
class Document:
    """A document as it was found right: its ids, and what it says of each of them.

    Attributes:
        ids: Integers `[N]`.
        trained: uint8 `[N]`, 0 for tokens that no label shall ask for; None where all are trained.
        values: Of each column `[N]` or `[N, k]`, by name.
    """

    ids: np.ndarray[Any, Any]
    trained: np.ndarray[Any, Any] | None
    values: Mapping[str, np.ndarray[Any, Any]]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> Document:
        """Return a part of the document, as views."""
        trained = None if self.trained is None else self.trained[part]
        return Document(self.ids[part], trained, {n: x[part] for n, x in self.values.items()})


def smallest_dtype(vocab_size: int | None) -> np.dtype[Any]:
    """Return the smallest dtype that holds a vocabulary's tokens; uint32 if it is unknown."""
    return np.dtype("uint32" if vocab_size is None else np.min_scalar_type(max(vocab_size - 1, 0)))


def checked_columns(by: str, columns: Mapping[str, Column] | None) -> dict[str, Column]:
    """Return what a corpus has of each token, in the order of the names.

    Raises:
        ValueError: A name is empty, or a batch has something else under it.

    Examples:
        >>> from trainkit.types import Column
        >>> checked_columns("make_corpus", {"labels": Column()})
        Traceback (most recent call last):
        ...
        ValueError: make_corpus: no column can be called 'labels': a batch has its own
    """
    for name in columns or {}:
        if not isinstance(name, str) or not name or name in _TAKEN:
            raise ValueError(f"{by}: no column can be called {name!r}: a batch has its own")
    return dict(sorted((columns or {}).items()))


def checked_document(
    document: ArrayLike | Sample,
    limit: int,
    where: str,
    *,
    columns: Mapping[str, Column],
    with_choice: bool | None = None,
) -> Document:
    """Return a document of ids or a `Sample` as it will be written or collated.

    Args:
        document: Ids or a `Sample`.
        limit: No token may be this large or larger.
        where: Which document of which function this is.
        columns: What it must have of each token.
        with_choice: Whether those before it were `Sample`s; None for the first.

    Raises:
        DataError: It is not what it must be.
    """
    is_sample = isinstance(document, Sample)
    if with_choice is not None and is_sample != with_choice:
        what = f" is {'a' if is_sample else 'no'} Sample, unlike those before it"
        must = "all documents of a corpus say which tokens are trained on, or none does"
        raise _wrong(where, f"{what}: {must}")
    ids = np.asarray(document.tokens if is_sample else document)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise _wrong(where, f" must be integers in one dimension, got {ids.dtype} {ids.shape}")
    if ids.size and (ids.min() < 0 or ids.max() >= limit):
        worst = int(((ids < 0) | (ids >= limit)).argmax())
        got = int(ids[worst])
        raise _wrong(where, f" has token {got} at {worst}, outside [0, {limit})", got)
    found = (document.columns if is_sample else None) or {}
    if found.keys() != columns.keys():
        have, want = (", ".join(sorted(names)) or "none" for names in (found, columns))
        mend = "say what there is in `columns`, and give every document values of it"
        raise _wrong(where, f" has the columns {have}; its corpus has {want}: {mend}", have)
    values = {
        name: _checked_values(found[name], column, len(ids), f"{where}: {name}")
        for name, column in columns.items()
    }
    if not is_sample:
        return Document(ids, None, values)
    trained = np.asarray(document.trained)
    if trained.dtype != np.bool_ or trained.shape != ids.shape:
        got = f"{trained.dtype} {trained.shape}"
        raise _wrong(where, f": `trained` must be bool {ids.shape}, like its tokens, got {got}")
    return Document(ids, trained.view(np.uint8), values)


def _checked_values(
    given: ArrayLike, column: Column, length: int, where: str
) -> np.ndarray[Any, Any]:
    """Return a document's values of a column, in its dtype."""
    shape, kind = (length, *column.inner), np.dtype(column.dtype)
    try:
        values = np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged, or on a device
        raise _wrong(where, f" is no array of {kind} {shape}: {error}") from error
    if not length and not values.size:
        return np.empty(shape, kind)
    if values.shape != shape or values.dtype.kind not in ("iuf" if kind.kind == "f" else "iu"):
        got = f"{values.dtype} {values.shape}"
        raise _wrong(where, f" must be {kind} {shape}, for {length} tokens, got {got}", got)
    with np.errstate(over="ignore"):
        held = values.astype(kind)
    fits = np.isfinite(held) if kind.kind == "f" else held == values
    if not fits.all():
        place = int(fits.reshape(length, -1).all(axis=1).argmin())
        got = values[place].tolist()
        raise _wrong(where, f" at token {place} is {got}, which no {kind} of a column can be", got)
    return held


def _wrong(where: str, what: str, got: object = None) -> DataError:
    return DataError(f"{where}{what}", where=where, got=got)
