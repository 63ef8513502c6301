"""Losses over the class or the reward of whole documents, from a head of few outputs.

`DecoderConfig(classes=C)` gives a decoder a head with C outputs in place of the vocabulary. It is
linear, so the outputs of a document are those of its pooled tokens: of the last one, of the first
one, or their mean. A document counts on the rank where it starts, so that it is one in every
layout. With ring and Ulysses its tokens are on several ranks; pass `axis=ps.sp`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from trainkit.losses.logits import read_field
from trainkit.losses.terms import NamedLoss, Terms, declare_terms
from trainkit.models.decoder import whole_logits
from trainkit.post.objectives.preference import make_pair_terms
from trainkit.post.objectives.sequences import count_names, sum_documents, sum_with_counts
from trainkit.types import IGNORED_LABEL, SOLO, Axis, check_choice

Pool = Literal["last", "first", "mean"]
"""The tokens of a document whose outputs are averaged."""


class PooledDocuments(NamedTuple):
    """The outputs of B rows of documents, by document id.

    `outputs` are fp32 (fp64 in an fp64 model) `[B, N, C]`, zeros for ids without a document.
    `starts_here` `[B, N]` is True for documents that start on this rank, `exists` for those of all.
    """

    outputs: Tensor
    starts_here: Tensor
    exists: Tensor


def pool_documents(
    output: Any, batch: Mapping[str, Any], *, pool: Pool = "last", axis: Axis = SOLO
) -> PooledDocuments:
    """Return the outputs of each document, pooled over its tokens, without its padding.

    Args:
        output: The output of a model: logits `[B, S, C]`, or what `models.whole_logits` takes.
        batch: "document_ids" and "position_ids", `[B, S]`.
        pool: "last" token, as for causal attention, whose last token alone sees all; "first", as
            the CLS token of an encoder; or the "mean" over all.
        axis: The ranks over which the tokens of a row are sharded, `ps.sp`.

    Raises:
        ValueError: `pool` is unknown, or the batch lacks a column.

    Effects:
        Communicates on `axis`: two all-reduces, one for the other pools than "last", and in
        backward another.

    Examples:
        >>> batch = {"document_ids": torch.tensor([[0, 0, 1, -1]])}
        >>> batch["position_ids"] = torch.tensor([[0, 1, 0, 0]])
        >>> logits = torch.tensor([[[1.0], [3.0], [5.0], [7.0]]])
        >>> for pool in ("last", "first", "mean"):
        ...     pool_documents(logits, batch, pool=pool).outputs[0, :2].flatten().tolist()
        [3.0, 5.0]
        [1.0, 5.0]
        [2.0, 5.0]
    """
    check_choice(get_args(Pool), "pool_documents", pool=pool)
    ids = read_field("pool_documents", batch, "document_ids")
    positions = read_field("pool_documents", batch, "position_ids")
    logits = whole_logits(output)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    is_pooled = ids >= 0

    def sum_over(is_pooled: Tensor, columns: Mapping[str, Tensor]) -> Any:
        # Its tokens "in the loss" are those that are pooled here.
        labels = torch.where(is_pooled, 0, IGNORED_LABEL)
        return sum_documents({**batch, "labels": labels}, columns, axis=axis, where="pool")

    if pool == "first":
        is_pooled = is_pooled & (positions == 0)
    elif pool == "last":
        # Its end may be on another rank, but its length is known to all after a sum.
        lengths = sum_over(is_pooled, {"none": logits[..., 0].detach()}).tokens
        last = lengths.gather(1, ids.clamp(min=0)).to(positions.dtype) - 1
        is_pooled = is_pooled & (positions == last)
    columns = {str(i): x for i, x in enumerate(logits.unbind(-1))}
    documents = sum_over(is_pooled, columns)
    outputs = torch.stack([documents.means(name) for name in columns], -1)
    return PooledDocuments(outputs, documents.starts_here, documents.exists)


def classify(*, pool: Pool = "last", axis: Axis = SOLO) -> NamedLoss:
    """Return the cross entropy of the classes of documents.

    `batch["classes"]`, int64 `[B, S]`, has the class of a document at its first token; documents
    with a negative one there are left out. The denominator is their number:
    `batch.count_documents(microbatches)` if each document has a class. It reports "classification"
    and "accuracy", each a sum over documents with its "/count".

    Args:
        pool: See `pool_documents`.
        axis: The ranks over which the tokens of a row are sharded.

    Raises:
        ValueError: `pool` is unknown.

    Effects:
        None here; the loss communicates on `axis` as `pool_documents` does, and once more.

    Examples:
        >>> batch = {"document_ids": torch.tensor([[0, 0, 1, 1]])}
        >>> batch["position_ids"] = torch.tensor([[0, 1, 0, 1]])
        >>> batch["classes"] = torch.tensor([[1, -1, 0, -1]])
        >>> total, terms = classify()(torch.zeros(1, 4, 3), batch)
        >>> float(total), int(terms["accuracy"]), int(terms["accuracy/count"])  # 2 log 3
        (2.19..., 1, 2)
    """
    check_choice(get_args(Pool), "classify", pool=pool)

    @declare_terms(*count_names("classification", "accuracy"))
    def loss(output: Any, batch: Mapping[str, Any]) -> Terms:
        documents = pool_documents(output, batch, pool=pool, axis=axis)
        given = read_field("classify", batch, "classes")
        is_first = (batch["position_ids"] == 0) & (batch["document_ids"] >= 0)
        labels = torch.where(is_first, 0, IGNORED_LABEL)
        # Class + 1, so that 0 is none; a sum over one token each, exact in floating point.
        column = (given.clamp(min=-1) + 1).to(documents.outputs.dtype)
        numbers = sum_documents({**batch, "labels": labels}, {"class": column}, axis=axis).sums
        classes = numbers["class"].round().long() - 1
        counts = documents.starts_here & (classes >= 0)
        losses = nn.functional.cross_entropy(
            documents.outputs.flatten(0, 1), classes.clamp(min=0).flatten(), reduction="none"
        ).view_as(classes)
        is_right = documents.outputs.argmax(-1) == classes
        terms = {"classification": losses, "accuracy": is_right.to(losses.dtype)}
        return torch.where(counts, losses, 0).sum(), sum_with_counts(terms, counts)

    return loss


def bradley_terry(*, pool: Pool = "last", axis: Axis = SOLO) -> NamedLoss:
    """Return the loss of a reward model: -log sigmoid of the difference of two answers' rewards.

    The reward of a document is the output of a head with one class. Document 2j of a row is the
    chosen answer to a prompt and 2j + 1 the rejected one (`chat.pack_pairs`); the denominator is
    `batch.count_documents(microbatches, halves=True)`. Terms are those of `dpo`.

    Args:
        pool: See `pool_documents`.
        axis: The ranks over which the tokens of a row are sharded.

    Raises:
        ValueError: `pool` is unknown.

    Effects:
        None here; the loss communicates on `axis` as `pool_documents` does.

    References:
        Bradley and Terry, "Rank analysis of incomplete block designs" (1952); Ouyang et al.,
        "Training language models to follow instructions with human feedback" (2022).

    Examples:
        >>> batch = {"document_ids": torch.tensor([[0, 0, 1, 1]])}
        >>> batch["position_ids"] = torch.tensor([[0, 1, 0, 1]])
        >>> logits = torch.tensor([0.0, 2.0, 0.0, -1.0]).view(1, 4, 1)
        >>> float(bradley_terry()(logits, batch)[1]["margin"])
        3.0
    """
    check_choice(get_args(Pool), "bradley_terry", pool=pool)

    @declare_terms(
        *count_names("preference", "margin", "accuracy", "chosen_reward", "rejected_reward")
    )
    def loss(output: Any, batch: Mapping[str, Any]) -> Terms:
        documents = pool_documents(output, batch, pool=pool, axis=axis)
        if documents.outputs.shape[-1] != 1:
            raise ValueError(
                "bradley_terry: a reward is the one output of DecoderConfig(classes=1), got "
                f"{documents.outputs.shape[-1]} outputs"
            )
        return make_pair_terms(
            documents.outputs[..., 0],
            lambda chosen, rejected: -nn.functional.logsigmoid(chosen - rejected),
            exists=documents.exists,
            starts_here=documents.starts_here,
        )

    return loss
