"""Packed documents against each document alone: what a model must not mix up."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import torch
from torch import Tensor, nn

from trainkit.batch import batch_from_rows, to_device
from trainkit.batch.shards import spans_of_lengths
from trainkit.models import call_model
from trainkit.parallel.packing_leaks import tensors_of
from trainkit.types import BATCH_TENSORS, Batch, Call, ConfigError

PACKING_BOUNDS = {
    torch.float64: 1e-6,
    torch.float32: 1e-3,
    torch.float16: 5e-3,
    torch.bfloat16: 3e-2,
}
"""How far a packed document may be from itself alone, by the dtype that is computed in.

In fp64 most models are at 1e-15, and at 1e-7 with a norm or a softmax that is in fp32 always; in
fp32 they are at 1e-6, and their gradients at 1e-5. Only a model that relies on several dtypes is
compared in fp16 (gradients at 9e-4 with two blocks) or bf16 (at 7e-3).
"""


class PackingError(ConfigError):
    """A model computes a packed document from other documents of its row (exit code 64)."""


@attrs.frozen
class PackingDifference:
    """How far packed documents are from each alone: max|a - b| / max|b|, in `dtype`.

    `output` is the largest over documents, `gradient` over parameters, of which `worst` names one.
    `documents` were compared.
    """

    documents: int
    output: float
    gradient: float
    worst: str
    dtype: torch.dtype = torch.float64


@attrs.frozen(eq=False)
class _Document:
    row: int
    index: int
    places: Tensor

    def __str__(self) -> str:
        return f"document {self.index} of row {self.row} ({len(self.places)} tokens)"


def check_packing(
    model: nn.Module,
    call: Call = call_model,
    *,
    batch: Batch | None = None,
    bound: float | None = None,
) -> PackingDifference:
    """Compare packed documents with each document alone: outputs and gradients, in fp64.

    A packed row must give the results of its documents one by one. Attention does, if it gets the
    boundaries of documents; a layer with a state over the row (Mamba, gated DeltaNet, a short
    convolution) often does not.

    Args:
        model: The whole model, with its weights. A copy is cast to fp64 (to fp32 if it cannot
            compute in fp64, as grouped products of experts cannot; one that computes in neither
            keeps its dtypes) and put into evaluation mode; the model itself stays as it is. Take a
            small one: each document is a forward and a backward pass of its own.
        call: How a batch enters it. Compared are all floating point tensors `[B, S, ...]` of what
            it returns.
        batch: Packed rows; by default two rows of three documents, of ids below the
            size of the model's first embedding. Padding is not compared.
        bound: How far apart they may be, max|a - b| / max|b|; by default that of
            `PACKING_BOUNDS`.

    Returns:
        The differences, which are within the bound.

    Raises:
        PackingError: An output or a gradient is farther off; says of which document, by how much,
            and what to do.
        ConfigError: The model has no embedding to read the number of words from, or `call` returns
            no tensor `[B, S, ...]`.

    Examples:
        >>> model = nn.Sequential(nn.Embedding(16, 4), nn.Linear(4, 16))
        >>> call = lambda model, batch: model(batch["input_ids"])
        >>> check_packing(model, call).documents
        6
        >>> summed = lambda model, batch: model(batch["input_ids"]).cumsum(1)
        >>> check_packing(model, summed)
        Traceback (most recent call last):
        ...
        trainkit.tools.testing.packing.PackingError: check_packing: Sequential computes ...
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    batch = to_device(_default_batch(model) if batch is None else batch, device)
    name, model = type(model).__name__, _convert_to_widest(model, call, batch)
    dtypes = [p.dtype for p in model.parameters() if p.is_floating_point()]
    dtype = max(dtypes, key=lambda x: torch.finfo(x).eps, default=torch.float64)
    bound = PACKING_BOUNDS[dtype] if bound is None else bound
    documents = _list_documents(batch)
    alone = [_select_document(batch, document) for document in documents]
    far = _output_distances(call, model, batch, documents, alone)
    off = [index for index, distance in enumerate(far) if distance > bound]
    if off:
        raise PackingError(
            f"check_packing: {name} computes {documents[off[0]]} from other documents of its row: "
            f"its outputs are {far[off[0]]:.1e} of the largest off from those of the document "
            f"alone (allowed: {bound:g}; {len(off)} of {len(far)} documents are off, the farthest "
            f"by {max(far):.1e}). Pack one document a row (pack_bins(..., max_documents=1)), or "
            "let `call` give the bounds of documents (batch['spans'].cu_seqlens, "
            "batch['document_ids']) to a model that takes them",
            where=str(documents[off[0]]),
            got=far[off[0]],
            want=bound,
        )
    wanted = [
        _compute_gradient(
            call, model, one, [_move_to_start(document)], documents[index : index + 1]
        )
        for index, (document, one) in enumerate(zip(documents, alone, strict=True))
    ]
    packed = _compute_gradient(call, model, batch, documents, documents)
    whole = {key: torch.stack([own[key] for own in wanted]).sum(0) for key in packed}
    distances = _gradient_distances(packed, whole)
    worst = max(distances, key=lambda key: distances[key], default="")
    if worst and distances[worst] > bound:
        by = [
            _gradient_distances(_compute_gradient(call, model, batch, [x], [x]), own)[worst]
            for x, own in zip(documents, wanted, strict=True)
        ]
        first = int(np.argmax(by))
        raise PackingError(
            f"check_packing: {name} has other gradients for packed documents than for each alone, "
            f"though their outputs are equal: that of {worst!r} is {distances[worst]:.1e} of its "
            f"largest element off (allowed: {bound:g}), most by {documents[first]}. A backward "
            "pass of its own, or a hook, mixes the documents of a row",
            where=worst,
            got=distances[worst],
            want=bound,
        )
    return PackingDifference(
        len(documents), max(far, default=0.0), distances.get(worst, 0.0), worst, dtype
    )


def _convert_to_widest(model: nn.Module, call: Call, batch: Batch) -> nn.Module:
    """Return a copy of a model in fp64, or in fp32 where it cannot compute in fp64.

    One that computes in neither, as it relies on the several dtypes that it is made in, keeps them.
    """
    for dtype in (torch.float64, torch.float32):
        copied = copy.deepcopy(model).to(dtype).eval()
        try:
            with torch.no_grad(), warnings.catch_warnings(action="ignore"):
                call(copied, batch)
        except (RuntimeError, NotImplementedError):  # a kernel for fewer bits, or for one dtype
            continue
        return copied
    return copy.deepcopy(model).eval()


def _default_batch(model: nn.Module) -> Batch:
    sizes = [x.num_embeddings for x in model.modules() if isinstance(x, nn.Embedding)]
    if not sizes:
        raise ConfigError(
            f"check_packing: {type(model).__name__} has no nn.Embedding to read the number of "
            "words from; give batch=, packed rows for it (batch_from_rows, collate_bins)",
            where="batch",
        )
    places = torch.arange(48).view(2, 24)
    starts = torch.zeros(2, 24, dtype=torch.bool)
    for row, column in ((0, 7), (0, 19), (1, 8), (1, 16)):
        starts[row, column] = True
    return batch_from_rows((7 * places * places + 3 * places) % sizes[0], starts=starts)


def _list_documents(batch: Batch) -> list[_Document]:
    return [
        _Document(row, index, (ids == index).nonzero().flatten())
        for row, ids in enumerate(batch.document_ids)
        for index in range(int(ids.max()) + 1)
    ]


def _select_document(batch: Batch, document: _Document) -> Batch:
    """Return a batch with one document of another batch."""
    cut = {
        name: batch[name][document.row, document.places].unsqueeze(0) for name in _list_names(batch)
    }
    cut["document_ids"] = torch.zeros_like(cut["document_ids"])
    own = [cut.pop(name) for name in BATCH_TENSORS]
    spans = spans_of_lengths(np.array([len(document.places)]), device=own[0].device)
    return Batch(*own, spans=spans, extra=cut)


def _list_names(batch: Batch) -> tuple[str, ...]:
    return (*BATCH_TENSORS, *batch.extra)


def _move_to_start(document: _Document) -> _Document:
    """Return the position of a document in a batch with that document only."""
    return _Document(0, 0, torch.arange(len(document.places)))


def _compute_outputs(call: Call, model: nn.Module, batch: Batch) -> list[Tensor]:
    output = call(model, batch)
    found = tensors_of(output, batch.input_ids.shape)
    if not found:
        raise ConfigError(
            f"check_packing: call must return a floating point tensor [B, S, ...], a Hidden, or a "
            f"record of such tensors, for input_ids {list(batch.input_ids.shape)}; got "
            f"{type(output).__name__}",
            where="call",
        )
    return found


def _output_distances(
    call: Call,
    model: nn.Module,
    batch: Batch,
    documents: Sequence[_Document],
    alone: Sequence[Batch],
) -> list[float]:
    far = []
    with torch.no_grad():
        packed = _compute_outputs(call, model, batch)
        for document, one in zip(documents, alone, strict=True):
            own = _compute_outputs(call, model, one)
            pairs = zip(packed, own, strict=True)
            distances = [
                _relative_difference(x[document.row, document.places], y[0]) for x, y in pairs
            ]
            far.append(max(distances))
    return far


def _compute_gradient(
    call: Call,
    model: nn.Module,
    batch: Batch,
    documents: Sequence[_Document],
    weighed_as: Sequence[_Document],
) -> dict[str, Tensor]:
    """Return the gradient of a sum over documents of their outputs, each times a fixed number.

    The numbers are functions of the element and of the document's place in `weighed_as`.
    """
    outputs = _compute_outputs(call, model, batch)
    total = outputs[0].new_zeros(())
    for document, original in zip(documents, weighed_as, strict=True):
        for x in outputs:
            own = x[document.row, document.places]
            phase = 5 * original.row + original.index
            weights = torch.arange(own.numel(), device=own.device).add(phase).double().sin()
            total = total + (own * weights.view(own.shape)).sum()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        return {}
    found = torch.autograd.grad(total, [*named.values()], allow_unused=True)
    return {
        name: torch.zeros_like(p) if grad is None else grad
        for (name, p), grad in zip(named.items(), found, strict=True)
    }


def _gradient_distances(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return max|a - b| / max|b| by name; what is rounding alone counts as 1 % of the largest."""
    largest = max((float(x.abs().max()) for x in wanted.values()), default=0.0)
    return {
        name: _relative_difference(found[name], wanted[name], least=1e-2 * largest)
        for name in found
    }


def _relative_difference(found: Tensor, wanted: Tensor, *, least: float = 0.0) -> float:
    """Return max|a - b| / max|b|; infinite where one alone is not finite."""
    finite = wanted.isfinite()
    if not torch.equal(found.isfinite(), finite):
        return float("inf")
    found, wanted = found[finite], wanted[finite]
    if not len(found) or torch.equal(found, wanted):
        return 0.0
    top = max(float(wanted.abs().max()), least)
    return float((found - wanted).abs().max()) / top if top else float("inf")
