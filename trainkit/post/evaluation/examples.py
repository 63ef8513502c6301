"""What is scored: token ids, of which the last ones count, cut to what a model sees at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from trainkit.types import DataError, IntArray, Tokenizer, check_range


@attrs.frozen(eq=False)
class Example:
    """A run of tokens that goes through a model at once, and how many of them count.

    Attributes:
        ids: Token ids, int64 `[N]`; the model is given all but the last.
        scored: How many of the last are scored, from 1 to N - 1.
        cut: How many tokens of the context were cut off on its left.
    """

    ids: IntArray
    scored: int
    cut: int = 0


@attrs.frozen(eq=False)
class EvalItem:
    """What one line of results is about: its examples, and what is known of it without a model."""

    examples: Sequence[Example]
    facts: Mapping[str, Any] = attrs.field(factory=dict)


def make_example(
    context_ids: Sequence[int], continuation_ids: Sequence[int], *, context: int
) -> Example:
    """Return a continuation of a context as an example, the context cut on its left to what fits.

    The last token is asked for and not given, so that `context` + 1 tokens fit.

    Args:
        context_ids: The tokens before, at least one.
        continuation_ids: The tokens that count, from 1 to `context`.
        context: The most tokens that the model is given.

    Raises:
        DataError: One of them has no token, or the continuation is too long to be seen at once.

    Examples:
        >>> example = make_example([1, 2, 3, 4], [5, 6], context=3)
        >>> example.ids, example.scored, example.cut
        (array([3, 4, 5, 6]), 2, 2)
    """
    check_range("make_example", at_least=1, context=context)
    count = len(continuation_ids)
    if not count or not len(context_ids):
        what = "context" if count else "continuation"
        raise DataError(f"the {what} is empty: it has no token", want="at least one token")
    if count > context:
        raise DataError(
            f"the continuation has {count} tokens, and the model sees {context} at once",
            got=count,
            want=f"at most {context}",
            hint="score it as a text, which is cut into windows",
        )
    ids = np.concatenate([np.asarray(context_ids), np.asarray(continuation_ids)]).astype(np.int64)
    cut = max(0, len(ids) - context - 1)
    return Example(ids[cut:], count, cut)


def make_rolling_windows(ids: Sequence[int], *, prefix: int, context: int) -> list[Example]:
    """Return windows over a text of any length in which each of its tokens counts exactly once.

    The first begins with `prefix`. Each further one holds the next `context` tokens, given the last
    token before them; the last one is filled up on its left with tokens that have counted already,
    so that it has all the context that it can. These are the windows of `lm-eval`.

    Args:
        ids: The text's tokens.
        prefix: What the first token follows upon: `get_prefix_id(tokenizer)`.
        context: The most tokens that the model is given.

    Examples:
        >>> windows = make_rolling_windows([1, 2, 3, 4, 5], prefix=0, context=3)
        >>> [(window.ids.tolist(), window.scored) for window in windows]
        [([0, 1, 2, 3], 3), ([2, 3, 4, 5], 2)]
    """
    check_range("make_rolling_windows", at_least=1, context=context)
    whole = np.concatenate([[prefix], np.asarray(ids, np.int64)]).astype(np.int64)
    ends = [min(done + context, len(ids)) for done in range(0, len(ids), context)]
    begins = [0, *ends[:-1]]
    return [
        Example(whole[max(0, end - context) : end + 1], end - begin)
        for begin, end in zip(begins, ends, strict=False)
    ]


def get_prefix_id(tokenizer: Tokenizer) -> int:
    """Return the token that a text follows upon that nothing stands before: BOS, or else EOS.

    Raises:
        DataError: The tokenizer has neither.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> get_prefix_id(make_byte_tokenizer())
        256
    """
    found = [getattr(tokenizer, name, None) for name in ("bos_id", "eos_id")]
    known = [i for i in found if i is not None]
    if not known:
        raise DataError(
            "the tokenizer has neither BOS nor EOS, which a text without context follows upon",
            where="tokenizer",
            hint="name one in tokenizer_config.json beside it",
        )
    return known[0]


def encode_continuation(
    tokenizer: Tokenizer, context: str, continuation: str, *, add_bos: bool = False
) -> tuple[list[int], list[int]]:
    """Return the tokens of a context and of its continuation, as `lm-eval` cuts them.

    Both are encoded as one text, so that a word is cut as in any text; blanks at the end of the
    context go to the continuation. An empty context is `get_prefix_id`.

    Args:
        tokenizer: What encodes them.
        context: What stands before, which may be empty.
        continuation: What shall be scored.
        add_bos: Begin with the tokenizer's BOS, unless the text does.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> encode_continuation(make_byte_tokenizer(), "a ", "b")
        ([97], [32, 98])
        >>> encode_continuation(make_byte_tokenizer(), "", "b")
        ([256], [98])
    """
    stem = context.rstrip()
    whole, before = (with_bos(tokenizer, x, add=add_bos) for x in (context + continuation, stem))
    if before:
        return before, whole[len(before) :]
    first = get_prefix_id(tokenizer)
    return ([first], whole) if whole[:1] != [first] else (whole[:1], whole[1:])


def with_bos(tokenizer: Tokenizer, text: str, *, add: bool) -> list[int]:
    """Return the tokens of a text, after BOS if that is asked for and it does not begin with it.

    Examples:
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> with_bos(make_byte_tokenizer(), "a", add=True)
        [256, 97]
    """
    ids = list(tokenizer.encode(text))
    bos = getattr(tokenizer, "bos_id", None)
    return [bos, *ids] if add and bos is not None and ids[:1] != [bos] else ids
