"""The chat template of a Hugging Face folder, and the tokens that end its answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.files import read_limited
from trainkit.text.chat.encode import find_stop_ids
from trainkit.text.chat.jinja import MARKER, make_jinja_template
from trainkit.text.chat.sources import JINJA_SOURCES
from trainkit.text.chat.templates import TEMPLATES
from trainkit.text.tokenizers.hf import open_hf_tokenizer, read_object, settings_beside
from trainkit.types import ConfigError, DataError

if TYPE_CHECKING:
    import os

    from trainkit.text.chat.messages import Message
    from trainkit.text.chat.templates import Segment, Template
    from trainkit.types import Tokenizer

_MOST_BYTES = 1 << 20
MORE_TEMPLATES = "additional_chat_templates"


def load_template(name: str | os.PathLike[str]) -> Template:
    """Return the template of that name in `TEMPLATES`, or that of a Hugging Face folder.

    Raises:
        ConfigError: It is neither.
        DataError: As `read_template`.

    Examples:
        >>> load_template("chatml") is TEMPLATES["chatml"]
        True
    """
    if str(name) in TEMPLATES:
        return TEMPLATES[str(name)]
    if not Path(name).is_dir():
        raise ConfigError(
            f"load_template: {str(name)!r} is no chat template and no folder with one; take "
            f"{', '.join(TEMPLATES)}, or a Hugging Face folder",
            where="template",
            got=str(name),
        )
    return read_template(name)


def choose_template_name(
    name: str | None, tokenizer: Tokenizer, *, own: str | None = None, where: str = "the model"
) -> str:
    """Return the name of the template to take: that given, or the model's own, or "chatml".

    Args:
        name: What a command line names; None where it names none.
        tokenizer: What conversations are encoded with.
        own: The template that the model, or the tokenizer's folder, brings along.
        where: What brings none, for the message where ChatML is assumed and does not fit.

    Raises:
        ConfigError: There is no such template, or the tokenizer has no single token for what ends
            an answer in it.

    Examples:
        >>> from trainkit.text.tokenizers import open_tokenizer
        >>> choose_template_name(None, open_tokenizer("bytes"))
        'chatml'
        >>> from trainkit.text.tokenizers import make_byte_tokenizer
        >>> choose_template_name(None, make_byte_tokenizer(), where="base/")
        Traceback (most recent call last):
        ...
        trainkit.types.ConfigError: choose_template_name: base/ brings no chat template, so ChatML
        was...
    """
    chosen = name or own or "chatml"
    template = load_template(chosen)
    try:
        find_stop_ids(tokenizer, template)
    except DataError:  # the template wants other conversations than the one that is tried
        pass
    except ValueError as error:
        found = str(error).removeprefix("stop_ids: ")
        if name or own:
            raise ConfigError(
                f"choose_template_name: {chosen}: {found}", where="template"
            ) from error
        raise ConfigError(
            f"choose_template_name: {where} brings no chat template, so ChatML was assumed, and "
            f"{found}",
            where="template",
            hint=f"name another by --template: {', '.join(TEMPLATES)}, or a folder that has one",
        ) from error
    return chosen


def template_hash(name: str | os.PathLike[str]) -> str:
    """Return what tells one chat template from another: 16 hex digits of a hash.

    It is made from the Jinja sources and from the texts of the special tokens that they read, so
    that a folder keeps its hash wherever it lies, and an exported folder has that of the native
    template it was given.

    Args:
        name: As in `load_template`.

    Raises:
        ConfigError: There is no such template.
        DataError: As `has_template`.

    Examples:
        >>> template_hash("chatml") == template_hash("qwen3")
        False
    """
    if str(name) in JINJA_SOURCES:
        sources, tokens = {"default": JINJA_SOURCES[str(name)]}, dict[str, str]()
    else:
        load_template(name)  # refuses what is none
        sources, tokens = folder_sources(Path(name)), _special_texts(Path(name))
    whole = "".join(map(str, sources.values()))
    read = {key: text for key, text in sorted(tokens.items()) if key in whole}
    text = json.dumps([sorted(sources.items()), read])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def has_template(folder: str | os.PathLike[str]) -> bool:
    """Say whether a Hugging Face folder has a chat template.

    Raises:
        DataError: A file of it is no JSON, or holds no template where one should be.

    Examples:
        >>> has_template("/does/not/exist")
        False
    """
    return bool(folder_sources(Path(folder)))


def locate_template(path: str | os.PathLike[str] | None) -> str | None:
    """Return the folder of a model, or of a `tokenizer.json`, as a template's name, if it has one.

    Args:
        path: The folder, or the `tokenizer.json` in it; None for none.

    Returns:
        A name for `load_template`; None where there is no chat template.

    Raises:
        DataError: As `has_template`.

    Examples:
        >>> locate_template("/does/not/exist") is None
        True
    """
    if path is None:
        return None
    file = Path(path)
    folder = file.parent if file.name == "tokenizer.json" else file
    return str(folder) if has_template(folder) else None


def read_template(
    folder: str | os.PathLike[str],
    *,
    name: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Template:
    """Return the chat template of a Hugging Face folder, as `transformers` would choose it.

    It stands in `chat_template.jinja` (others by name in `additional_chat_templates`), in
    `tokenizer_config.json`, or in `chat_template.json`; the first of these that is there is taken.
    Of several, "tool_use" is for conversations with tools, and "default" for others. What ends an
    answer is the token of the tokenizer that the template writes after one, its `eos_token`, or
    what `generation_config.json` stops at.

    Args:
        folder: The folder, with a `tokenizer.json`.
        name: Which of several templates; None for the rule above.
        variables: Further names that the source reads, such as `enable_thinking`.

    Returns:
        The template; its masks are those of `make_jinja_template`.

    Raises:
        DataError: The folder has no tokenizer, no template, or none of that name; or a file of it
            is none; the message says which.
        ValueError: A template is no Jinja, asks for files or Python's insides, or ends an answer
            with no token of the tokenizer.
        ConfigError: A library is missing: `pip install "trainkit-lm[hf]"`.

    Examples:
        >>> import json, tempfile
        >>> from trainkit.weights.hub import make_tokenizer_files
        >>> source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
        >>> with tempfile.TemporaryDirectory() as home:
        ...     for file, data in make_tokenizer_files("bytes").items():
        ...         _ = (Path(home) / file).write_bytes(data)
        ...     _ = (Path(home) / "chat_template.jinja").write_text(source)
        ...     template = read_template(home)
        >>> [segment.text for segment in template([{"role": "user", "content": "hi"}])]
        ['[user]', 'hi<|im_end|>']
    """
    path = Path(folder)
    tokenizer = open_hf_tokenizer(path)
    tokens = _special_texts(path)
    sources = folder_sources(path)
    wanted = sources if name is None else {name: sources.get(name)}
    if not sources or None in wanted.values():
        what = f"has no chat template {name!r}" if sources else "has no chat template"
        raise DataError(
            f"read_template: {path} {what}; it has {', '.join(sources) or 'none'}",
            where=path,
            hint="take one of trainkit.text.chat.TEMPLATES, if the model was trained with it",
        )
    stops = [tokenizer.backend.id_to_token(i) for i in read_stop_ids(path)]
    known = {*tokenizer.special_ids, *(stop for stop in stops if stop)}
    ends = {text for text in (*stops, tokens.get("eos_token")) if text}
    found = {
        each: _template(
            f"{path}: {each}", str(source), known, ends, {**tokens, **(variables or {})}
        )
        for each, source in wanted.items()
    }
    return next(iter(found.values())) if len(found) == 1 else partial(_chosen, templates=found)


def _special_texts(path: Path) -> dict[str, str]:
    """Return the texts of a folder's special tokens by their names, such as "eos_token"."""
    settings = settings_beside(path / "tokenizer.json")
    said = {key: value for key, value in settings.items() if key.endswith("_token")}
    texts = {k: v.get("content") if isinstance(v, Mapping) else v for k, v in said.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def read_stop_ids(folder: str | os.PathLike[str]) -> tuple[int, ...]:
    """Return the ids at which a folder's model stops: `eos_token_id` of its generation config.

    Where `generation_config.json` says none, `config.json` is asked.

    Returns:
        The ids, none where neither says any.

    Raises:
        DataError: A file is no JSON, or the ids are no numbers.

    Examples:
        >>> read_stop_ids("/does/not/exist")
        ()
    """
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        ids = read_object(path).get("eos_token_id") if path.is_file() else None
        if ids is None:
            continue
        listed = ids if isinstance(ids, list) else [ids]
        if not all(type(i) is int and i >= 0 for i in listed):
            raise DataError(f"{path}: eos_token_id is {ids!r:.60}, no id", where=path)
        return tuple(listed)
    return ()


def _template(
    name: str, source: str, known: set[str], ends: set[str], variables: Mapping[str, Any]
) -> Template:
    """Return a template that ends an answer with a known token, or one that the model stops at."""
    probe = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARKER}]
    tokens = {each: variables.get(each) for each in ("bos_token", "eos_token")}
    said = make_jinja_template(source, **tokens, stop=MARKER, variables=variables)
    try:
        after = "".join(segment.text for segment in said(probe)).rpartition(MARKER)[2].lstrip()
    except DataError:  # it wants other conversations than this one
        after = ""
    own = {token for token in known if after.startswith(token)}
    stops = ends | {max(own, key=len)} if own else ends
    if not stops:
        raise ValueError(
            f"read_template: {name} ends an answer with no token of the tokenizer, and no "
            "eos_token is named; say it in tokenizer_config.json"
        )
    return make_jinja_template(source, **tokens, stop=sorted(stops), variables=variables)


def _chosen(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    templates: Mapping[str, Template],
) -> list[Segment]:
    name = "tool_use" if tools is not None and "tool_use" in templates else "default"
    if name not in templates:
        names = ", ".join(templates)
        raise DataError(f"read_template: none of the templates is the default; name one: {names}")
    return templates[name](messages, tools=tools, add_generation_prompt=add_generation_prompt)


def folder_sources(path: Path) -> dict[str, Any]:
    """Return the chat templates of a Hugging Face folder as Jinja texts, by their names.

    Raises:
        DataError: A file of it is no JSON, or holds no template where one should be.

    Examples:
        >>> folder_sources(Path("/does/not/exist"))
        {}
    """
    files = {"default": path / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((path / MORE_TEMPLATES).glob("*.jinja"))}
    found: dict[str, Any] = {
        name: _bytes(file).decode(errors="replace") for name, file in files.items() if file.exists()
    }
    said: Any = settings_beside(path / "tokenizer.json").get("chat_template")
    if not found and said is None and (path / "chat_template.json").is_file():
        said = read_object(path / "chat_template.json").get("chat_template")
    if found or said is None:
        return found
    listed = said if isinstance(said, list) else [{"name": "default", "template": said}]
    good = [each for each in listed if isinstance(each, dict)]
    found = {str(each.get("name")): each.get("template") for each in good}
    if len(good) != len(listed) or not all(isinstance(text, str) for text in found.values()):
        raise DataError(f"read_template: {path}: chat_template is no text, and no list of them")
    return found


def _bytes(path: Path) -> bytes:
    try:
        return read_limited(path, most=_MOST_BYTES)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}", where=path) from error
