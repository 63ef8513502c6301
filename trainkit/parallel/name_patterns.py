"""Patterns that choose modules, parameters and tensors by name, for every flag and function.

They are those of a shell, with the parts of a name, which dots separate, in place of folders:

    *          one part of a name, or some letters of it   layers.*.mlp.up, *.weight
    **         any number of parts, or none                **.bias, layers.3.**, **
    ?  [qkv]   one letter; one of these letters            layers.*.attention.w[qkv]
    [!o]       one letter that is none of these            layers.*.attention.w[!o]
    {a,b}      one of several                              layers.*.{attention,mlp}_norm.weight

A pattern matches whole names in the whole model, which do not depend on the layout.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from trainkit.types import ConfigError

_LISTED = 12  # names in an error message
_PIECES = re.compile(r"\*\*\.|\*+|\?|\[[^\]]+\]|[{},]|[^*?\[{},]+|.", re.DOTALL)


@functools.cache
def compile_pattern(pattern: str) -> re.Pattern[str]:
    r"""Return a pattern of names as a regular expression for `fullmatch`.

    Raises:
        ConfigError: A bracket is not closed, or a range runs backwards.

    Examples:
        >>> compile_pattern("layers.*.{up,down}").pattern
        'layers\\.[^.]*\\.(?:up|down)'
    """
    depth = 0
    translated: list[str] = []
    for piece in _PIECES.findall(pattern):
        depth += (piece == "{") - (piece == "}")
        if depth < 0 or piece == "[":
            break
        if piece == "**.":
            translated.append(r"(?:.*\.)?")
        elif piece.startswith("**"):
            translated.append(".*")
        elif piece.startswith("["):
            letters = re.sub(r"[\\\[^&~|]", r"\\\g<0>", piece[1:-1])
            is_negated = letters[0] == "!" and len(letters) > 1
            # A dot is no letter: it ends a part.
            translated.append(f"[^.{letters[1:]}]" if is_negated else f"[{letters}]")
        elif piece == "," and not depth:
            translated.append(",")
        else:
            special = {"*": "[^.]*", "?": "[^.]", "{": "(?:", "}": ")", ",": "|"}
            translated.append(special.get(piece) or re.escape(piece))
    else:
        if not depth:
            try:
                return re.compile("".join(translated))
            except re.error as error:
                raise ConfigError(
                    f"a pattern of names is not valid: {pattern!r} has a {error.msg}",
                    where="pattern",
                    got=pattern,
                    want="ranges in the order of the letters, as in 'layers.[0-3].**'",
                ) from error
    raise ConfigError(
        f"a pattern of names is not complete: {pattern!r} has a bracket without its other half",
        where="pattern",
        got=pattern,
        want="*, **, ?, [abc] and {a,b}, as in 'layers.*.attention.w[qkv]'",
    )


def name_matches(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a whole name.

    Examples:
        >>> name_matches("layers.3", "layers.*"), name_matches("layers.3.mlp", "layers.*")
        (True, False)
        >>> name_matches("bias", "**.bias"), name_matches("layers.3.mlp.bias", "**.bias")
        (True, True)
    """
    return compile_pattern(pattern).fullmatch(name) is not None


def match_any(name: str, patterns: Iterable[str]) -> bool:
    """Return whether one of several patterns matches a whole name.

    Examples:
        >>> match_any("head.weight", ["embedding.*", "head.*"])
        True
    """
    return any(name_matches(name, pattern) for pattern in patterns)


def join_names(names: Iterable[str]) -> str:
    """Return the pattern that matches these names and no other.

    Examples:
        >>> join_names(["head", "layers.0.mlp.up"])
        '{head,layers.0.mlp.up}'
    """
    return "{" + ",".join(re.sub(r"[*?\[{},]", r"[\g<0>]", name) for name in names) + "}"


def match_names(pattern: str, names: Iterable[str], *, function: str, kind: str) -> list[str]:
    """Return the names that a pattern matches; at least one must match.

    Args:
        pattern: The pattern, of whole names.
        names: The names in the whole model, as `canonical_name` returns them.
        function: The name of the caller, for the message.
        kind: The kind of thing that is named, for the message.

    Raises:
        ConfigError: The pattern is not complete, or matches no name; the message lists the names,
            those of equal layers once.

    Examples:
        >>> names = ["layers.0.mlp.up", "layers.1.mlp.up", "head"]
        >>> match_names("layers.*.mlp.up", names, function="lora", kind="matrix")
        ['layers.0.mlp.up', 'layers.1.mlp.up']
        >>> match_names("up", names, function="lora", kind="matrix")
        Traceback (most recent call last):
        trainkit.types.ConfigError: lora: 'up' matches the name of no matrix; those there are: ...
    """
    names = list(names)
    matching = [name for name in names if name_matches(name, pattern)]
    if not matching:
        # Blocks have the same names inside: show those of one.
        distinct = list(dict.fromkeys(re.sub(r"\.\d+\.", ".0.", name) for name in names))
        available = "; ".join([*distinct[:_LISTED], *(["..."] if len(distinct) > _LISTED else [])])
        # A reader who knows regular expressions writes one; no name has these characters.
        is_regular = re.search(r"[\\()|+^$]", pattern) is not None
        raise ConfigError(
            f"{function}: {pattern!r} matches the name of no {kind}; those there are: {available}",
            where="pattern",
            got=pattern,
            want="a pattern of whole names, such as 'layers.*.attention.w[qkv]' or '**.bias'",
            hint="it is no regular expression: * is one part of a name, ** any number, {a,b} one "
            "of several"
            if is_regular
            else None,
        )
    return matching
