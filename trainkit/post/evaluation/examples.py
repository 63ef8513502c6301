"""Examples to score: token ids, of which the last ones are scored, truncated to a context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from trainkit.types import DataError, IntArray, Tokenizer, check_range


@attrs.frozen(eq=False)
class Example:
    """Tokens that go through the model in one forward pass, the last ones of which are scored.

    Attributes:
        ids: Token ids, int64 `[N]`; the model's input is all but the last.
        scored: Number of scored tokens, the last of `ids`, from 1 to N - 1.
        cut: Number of tokens that were truncated on the left of the context.
    """

    ids: IntArray
    scored: int
    cut: int = 0


@attrs.frozen(eq=False)
class EvalItem:
    """An item of an evaluation, which gets one result: its examples, and metadata."""

    examples: Sequence[Example]
    metadata: Mapping[str, Any] = attrs.field(factory=dict)


def make_example(
    context_ids: Sequence[int], continuation_ids: Sequence[int], *, context: int
) -> Example:
    """Make an example that scores a continuation; its context is truncated on the left.

    The last token is only a label, so that `context` + 1 tokens fit.

    Args:
        context_ids: Tokens before the continuation, at least one.
        continuation_ids: Tokens to score, from 1 to `context`.
        context: Maximum number of tokens in the model's input.

    Raises:
        DataError: One of them has no token, or the continuation is longer than `context`.

    Examples:
        >>> example = make_example([1, 2, 3, 4], [5, 6], context=3)
        >>> example.ids, example.scored, example.cut
        (array([3, 4, 5, 6]), 2, 2)
    """
    check_range("make_example", at_least=1, context=context)
    count = len(continuation_ids)
    if not count:
        raise DataError("the continuation is empty: it has no token", want="at least one token")
    if not len(context_ids):
        raise DataError("the context is empty: it has no token", want="at least one token")
    if count > context:
        raise DataError(
            f"the continuation has {count} tokens, but the model's context is {context}",
            got=count,
            want=f"at most {context}",
            hint="score it as a text, which is split into windows",
        )
    ids = np.concatenate([np.asarray(context_ids), np.asarray(continuation_ids)]).astype(np.int64)
    cut = max(0, len(ids) - context - 1)  # the last token is no input
    return Example(ids[cut:], count, cut)


def make_rolling_windows(ids: Sequence[int], *, prefix: int, context: int) -> list[Example]:
    """Split a text of any length into windows that score each of its tokens exactly once.

    The first window starts with `prefix`. Each further one scores the next `context` tokens, after
    the one token before them; the last one is extended on the left with tokens that were scored
    already, to a full context. These are the windows of `lm-eval`.

    Args:
        ids: The text's tokens.
        prefix: The token before the text: `get_prefix_id(tokenizer)`.
        context: Maximum number of tokens in the model's input.

    Examples:
        >>> windows = make_rolling_windows([1, 2, 3, 4, 5], prefix=0, context=3)
        >>> [(window.ids.tolist(), window.scored) for window in windows]
        [([0, 1, 2, 3], 3), ([2, 3, 4, 5], 2)]
    """
    check_range("make_rolling_windows", at_least=1, context=context)
    # With the prefix, token i of the text is at i + 1, and its context ends at i.
    tokens = np.concatenate([[prefix], np.asarray(ids, np.int64)]).astype(np.int64)
    ends = [min(start + context, len(ids)) for start in range(0, len(ids), context)]
    starts = [0, *ends[:-1]]
    return [
        Example(tokens[max(0, end - context) : end + 1], end - start)
        for start, end in zip(starts, ends, strict=False)
    ]


def get_prefix_id(tokenizer: Tokenizer) -> int:
    """Return the token before a text without context: BOS, or else EOS.

    Raises:
        DataError: The tokenizer has neither.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> get_prefix_id(make_byte_tokenizer())
        256
    """
    # The same fallback as lm-eval's, so that perplexities are comparable.
    for name in ("bos_id", "eos_id"):
        token = getattr(tokenizer, name, None)
        if token is not None:
            return token
    raise DataError(
        "the tokenizer has neither BOS nor EOS, one of which must precede a text without context",
        where="tokenizer",
        hint="name one in its tokenizer_config.json",
    )


def encode_continuation(
    tokenizer: Tokenizer,
    context: str,
    continuation: str,
    *,
    add_bos: bool = False,
) -> tuple[list[int], list[int]]:
    """Encode a context and its continuation, split as by `lm-eval`.

    Both are encoded as one text, so that tokens are those of running text; white space at the end
    of the context belongs to the continuation. An empty context becomes `get_prefix_id`.

    Args:
        tokenizer: Encodes the text.
        context: The context, which may be empty.
        continuation: The text to score.
        add_bos: Prepend the tokenizer's BOS, unless the text starts with it.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> encode_continuation(make_byte_tokenizer(), "a ", "b")
        ([97], [32, 98])
        >>> encode_continuation(make_byte_tokenizer(), "", "b")
        ([256], [98])
    """
    ids = encode_with_bos(tokenizer, context + continuation, add_bos=add_bos)
    # Where a token spans the boundary, the split follows the number of tokens, as lm-eval's does.
    context_ids = encode_with_bos(tokenizer, context.rstrip(), add_bos=add_bos)
    if context_ids:
        return context_ids, ids[len(context_ids) :]
    prefix = get_prefix_id(tokenizer)
    if ids[:1] == [prefix]:  # a BOS that the tokenizer has added is the prefix
        return ids[:1], ids[1:]
    return [prefix], ids


def encode_with_bos(tokenizer: Tokenizer, text: str, *, add_bos: bool) -> list[int]:
    """Encode a text, and optionally prepend BOS if it does not start with it.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> encode_with_bos(make_byte_tokenizer(), "a", add_bos=True)
        [256, 97]
    """
    ids = list(tokenizer.encode(text))
    bos = getattr(tokenizer, "bos_id", None)
    # A tokenizer of transformers may add it itself.
    needs_bos = add_bos and bos is not None and ids[:1] != [bos]
    return [bos, *ids] if needs_bos else ids
