"""Compare packed documents with each document alone, to find models that mix them."""

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
"""The largest difference of a packed document from itself alone, by the dtype of computation.

Measured: in fp64 1e-15, or 1e-7 for models with a norm or a softmax that is always in fp32; in fp32
1e-6, gradients 1e-5. Only models that need several dtypes are compared in fp16 (gradients 9e-4 with
two blocks) or bf16 (7e-3).
"""


class PackingError(ConfigError):
    """A model mixes the documents of a packed row (exit code 64)."""


@attrs.frozen
class PackingDifference:
    """The differences of packed documents from each alone: max|a - b| / max|b|, in `dtype`.

    `output` is the maximum over the `documents` that were compared, `gradient` that over
    parameters, and `worst` the parameter that has it.
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
    columns: Tensor
    phase: int  # of the weights of its outputs, the same where it is alone

    def __str__(self) -> str:
        return f"document {self.index} of row {self.row} ({len(self.columns)} tokens)"


def check_packing(
    model: nn.Module,
    call: Call = call_model,
    *,
    batch: Batch | None = None,
    bound: float | None = None,
) -> PackingDifference:
    """Compare the outputs and gradients of packed documents with those of each document alone.

    They must be equal. Attention achieves that if it gets the boundaries of documents; a layer with
    a state along the row (Mamba, gated DeltaNet, a short convolution) often does not.

    Args:
        model: The whole model, with its weights; a small one, since each document takes a forward
            and a backward pass. A copy is put into evaluation mode and cast to fp64, or to fp32 if
            it cannot compute in fp64 (grouped matmuls of experts cannot), or keeps its dtypes if it
            computes in neither. The model itself is not changed.
        call: How a batch enters the model. All floating-point tensors `[B, S, ...]` that it returns
            are compared.
        batch: Packed rows; by default two rows of three documents, with ids below the size of the
            model's first embedding. Padding is not compared.
        bound: The largest difference that is allowed, max|a - b| / max|b|; by default that of
            `PACKING_BOUNDS`.

    Returns:
        The differences, which are within the bound.

    Raises:
        PackingError: A difference of an output or a gradient is larger; names the document.
        ConfigError: The model has no embedding to read the vocabulary size from, or `call` returns
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
    name = type(model).__name__
    model = _convert_to_widest(model, call, batch)
    # Quantized codes are integers, and say nothing about the arithmetic.
    dtypes = [p.dtype for p in model.parameters() if p.is_floating_point()]
    # A model in several dtypes is as exact as the least precise of them.
    dtype = max(dtypes, key=lambda x: torch.finfo(x).eps, default=torch.float64)
    bound = PACKING_BOUNDS[dtype] if bound is None else bound
    documents = [
        # Ids below 0 are padding, which belongs to no document. Phases differ between documents.
        _Document(row, index, (ids == index).nonzero().flatten(), phase=5 * row + index)
        for row, ids in enumerate(batch.document_ids)
        for index in range(int(ids.max()) + 1)
    ]
    alone = [_select_document(batch, document) for document in documents]
    # Outputs first: forward passes alone find most leaks, and name the document.
    outputs = _compare_outputs(call, model, batch, documents, alone)
    off = [index for index, difference in enumerate(outputs) if difference > bound]
    if off:
        raise PackingError(
            f"check_packing: {name} computes {documents[off[0]]} from other documents of its row: "
            f"its outputs are {outputs[off[0]]:.1e} of the largest off from those of the document "
            f"alone (allowed: {bound:g}; {len(off)} of {len(outputs)} documents are off, the "
            f"farthest by {max(outputs):.1e}). Pack one document a row (pack_bins(..., "
            "max_documents=1)), or let `call` give the bounds of documents "
            "(batch['spans'].cu_seqlens, batch['document_ids']) to a model that takes them",
            where=str(documents[off[0]]),
            got=outputs[off[0]],
            want=bound,
        )
    worst, gradient = _check_gradients(call, model, batch, documents, alone, bound=bound, name=name)
    return PackingDifference(
        documents=len(documents),
        output=max(outputs, default=0.0),
        gradient=gradient,
        worst=worst,
        dtype=dtype,
    )


def _check_gradients(
    call: Call,
    model: nn.Module,
    batch: Batch,
    documents: Sequence[_Document],
    alone: Sequence[Batch],
    *,
    bound: float,
    name: str,
) -> tuple[str, float]:
    """Return the parameter with the largest difference, and that; raise if it exceeds the bound."""
    wanted = [
        _compute_gradient(
            call,
            model,
            one,
            # Alone, a document is row 0 of its batch, from column 0 on.
            [attrs.evolve(document, row=0, columns=torch.arange(len(document.columns)))],
        )
        for document, one in zip(documents, alone, strict=True)
    ]
    packed = _compute_gradient(call, model, batch, documents)
    # The packed gradient must be the sum of those of the documents alone.
    total = {key: torch.stack([own[key] for own in wanted]).sum(0) for key in packed}
    gradients = _compare_gradients(packed, total)
    worst = max(gradients, key=lambda key: gradients[key], default="")
    if worst and gradients[worst] > bound:
        # Only now each document's gradient in the packed row, which takes a backward pass each.
        by_document = [
            _compare_gradients(_compute_gradient(call, model, batch, [x]), own)[worst]
            for x, own in zip(documents, wanted, strict=True)
        ]
        raise PackingError(
            f"check_packing: {name} has other gradients for packed documents than for each alone, "
            f"though their outputs are equal: that of {worst!r} is {gradients[worst]:.1e} of its "
            f"largest element off (allowed: {bound:g}), most by "
            f"{documents[int(np.argmax(by_document))]}. A backward pass of its own, or a hook, "
            "mixes the documents of a row",
            where=worst,
            got=gradients[worst],
            want=bound,
        )
    return worst, gradients.get(worst, 0.0)


def _convert_to_widest(model: nn.Module, call: Call, batch: Batch) -> nn.Module:
    """Return a copy of a model in fp64, or else in fp32, or else in the dtypes that it has."""
    for dtype in (torch.float64, torch.float32):
        # Dropout would draw other noise for other shapes.
        copied = copy.deepcopy(model).to(dtype).eval()
        try:
            with torch.no_grad(), warnings.catch_warnings(action="ignore"):
                call(copied, batch)
        except (RuntimeError, NotImplementedError):  # a kernel without this dtype
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
    positions = torch.arange(48).view(2, 24)
    # Three documents a row: of 7, 12 and 5 tokens in the first, of 8 each in the second.
    starts = torch.zeros(2, 24, dtype=torch.bool)
    for row, column in ((0, 7), (0, 19), (1, 8), (1, 16)):
        starts[row, column] = True
    # Any ids that differ between documents would do; these need no generator.
    return batch_from_rows((7 * positions * positions + 3 * positions) % sizes[0], starts=starts)


def _select_document(batch: Batch, document: _Document) -> Batch:
    """Return a batch with one document of another batch."""
    tensors = {
        name: batch[name][document.row, document.columns].unsqueeze(0)
        for name in (*BATCH_TENSORS, *batch.extra)
    }
    # It is document 0 of its batch; its positions start at 0 in any row.
    tensors["document_ids"] = torch.zeros_like(tensors["document_ids"])
    own = [tensors.pop(name) for name in BATCH_TENSORS]
    spans = spans_of_lengths(np.array([len(document.columns)]), device=own[0].device)
    return Batch(*own, spans=spans, extra=tensors)


def _compute_outputs(call: Call, model: nn.Module, batch: Batch) -> list[Tensor]:
    output = call(model, batch)
    tensors = tensors_of(output, batch.input_ids.shape)
    if not tensors:
        raise ConfigError(
            f"check_packing: call must return a floating point tensor [B, S, ...], a Hidden, or a "
            f"record of such tensors, for input_ids {list(batch.input_ids.shape)}; got "
            f"{type(output).__name__}",
            where="call",
        )
    return tensors


def _compare_outputs(
    call: Call,
    model: nn.Module,
    batch: Batch,
    documents: Sequence[_Document],
    alone: Sequence[Batch],
) -> list[float]:
    """Return the largest difference of each document's outputs from those of it alone."""
    differences = []
    with torch.no_grad():
        packed = _compute_outputs(call, model, batch)
        for document, one in zip(documents, alone, strict=True):
            own = _compute_outputs(call, model, one)
            differences.append(
                max(
                    _relative_difference(x[document.row, document.columns], y[0])
                    for x, y in zip(packed, own, strict=True)
                )
            )
    return differences


def _compute_gradient(
    call: Call,
    model: nn.Module,
    batch: Batch,
    documents: Sequence[_Document],
) -> dict[str, Tensor]:
    """Return the gradient of a weighted sum of the documents' outputs.

    The weights differ by element and document, so that no two gradients cancel or agree by chance.
    """
    outputs = _compute_outputs(call, model, batch)
    total = outputs[0].new_zeros(())
    for document in documents:
        for x in outputs:
            own = x[document.row, document.columns]
            # Weights in fp64 make the sum fp64, which adds no rounding to that of the model.
            angles = torch.arange(own.numel(), device=own.device) + document.phase
            weights = angles.double().sin().view(own.shape)
            total = total + (own * weights).sum()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        return {}
    # Zeros for unused parameters: experts that no token of a document chooses.
    grads = torch.autograd.grad(total, [*named.values()], allow_unused=True, materialize_grads=True)
    return dict(zip(named, grads, strict=True))


def _compare_gradients(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return max|a - b| / max|b| by name, with max|b| at least 1 % of that of all parameters."""
    # Without that floor a gradient that is 0 but for rounding would be infinitely far from itself.
    largest = max((float(x.abs().max()) for x in wanted.values()), default=0.0)
    return {
        name: _relative_difference(found[name], wanted[name], floor=1e-2 * largest)
        for name in found
    }


def _relative_difference(found: Tensor, wanted: Tensor, *, floor: float = 0.0) -> float:
    """Return max|a - b| / max|b|; infinity where only one of them is finite."""
    finite = wanted.isfinite()
    # Comparisons with NaN are false, so a model that overflows only when packed would pass.
    if not torch.equal(found.isfinite(), finite):
        return float("inf")
    found, wanted = found[finite], wanted[finite]
    if not len(found) or torch.equal(found, wanted):
        return 0.0
    largest = max(float(wanted.abs().max()), floor)
    return float((found - wanted).abs().max()) / largest if largest else float("inf")
