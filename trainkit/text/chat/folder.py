"""The chat template and the stop tokens of a Hugging Face folder."""

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
from trainkit.text.tokenizers.hf import open_hf_tokenizer, read_json_object, read_tokenizer_settings
from trainkit.types import ConfigError, DataError

if TYPE_CHECKING:
    import os

    from trainkit.text.chat.messages import Message
    from trainkit.text.chat.templates import Segment, Template
    from trainkit.types import Tokenizer

_MAX_BYTES = 1 << 20
MORE_TEMPLATES = "additional_chat_templates"


def load_template(name: str | os.PathLike[str]) -> Template:
    """Load a template by its name in `TEMPLATES`, or from a Hugging Face folder.

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
    """Choose the name of a template: the given one, or the model's, or "chatml".

    Args:
        name: The name on the command line; None if there is none.
        tokenizer: The tokenizer of the conversations.
        own: The template of the model, or of the tokenizer's folder.
        where: What has no template, for the message if ChatML is assumed and does not fit.

    Raises:
        ConfigError: There is no such template, or the tokenizer has no single token for its stop
            token.

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
    except DataError:  # the template rejects the conversation of the test, so nothing is known
        pass
    except ValueError as error:
        reason = str(error).removeprefix("find_stop_ids: ")
        # The template is not in question here, only the tokens that it needs.
        if name or own:
            raise ConfigError(
                f"choose_template_name: {chosen}: {reason}", where="template"
            ) from error
        raise ConfigError(
            f"choose_template_name: {where} brings no chat template, so ChatML was assumed, and "
            f"{reason}",
            where="template",
            hint=f"name another by --template: {', '.join(TEMPLATES)}, or a folder that has one",
        ) from error
    return chosen


def template_hash(name: str | os.PathLike[str]) -> str:
    """Return a hash of a chat template, 16 hex digits.

    It covers the Jinja sources, and the texts of the special tokens that they read. So a folder has
    the same hash wherever it is, and an exported folder that of its native template.

    Args:
        name: As in `load_template`.

    Raises:
        ConfigError: There is no such template.
        DataError: As `read_template_sources`.

    Examples:
        >>> template_hash("chatml") == template_hash("qwen3")
        False
    """
    # A native template has the hash of the Jinja that is exported for it.
    if str(name) in JINJA_SOURCES:
        sources: dict[str, Any] = {"default": JINJA_SOURCES[str(name)]}
        tokens: dict[str, str] = {}
    else:
        load_template(name)  # raises if there is none
        sources = read_template_sources(Path(name))
        tokens = _read_special_texts(Path(name))
    # Special tokens that no source reads do not change what is rendered.
    all_sources = "".join(map(str, sources.values()))
    read_tokens = {key: text for key, text in sorted(tokens.items()) if key in all_sources}
    text = json.dumps([sorted(sources.items()), read_tokens])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def locate_template(path: str | os.PathLike[str] | None) -> str | None:
    """Return the folder of a model, or of a `tokenizer.json`, if it has a chat template.

    Args:
        path: The folder, or the `tokenizer.json` in it; None for none.

    Returns:
        A name for `load_template`; None if there is no chat template.

    Raises:
        DataError: As `read_template_sources`.

    Examples:
        >>> locate_template("/does/not/exist") is None
        True
    """
    if path is None:
        return None
    file = Path(path)
    folder = file.parent if file.name == "tokenizer.json" else file
    return str(folder) if read_template_sources(folder) else None


def read_template(
    folder: str | os.PathLike[str],
    *,
    name: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Template:
    """Read the chat template of a Hugging Face folder, as `transformers` would choose it.

    It is in `chat_template.jinja` (others by name in `additional_chat_templates`), in
    `tokenizer_config.json`, or in `chat_template.json`; the first of these that exists is taken. Of
    several, "tool_use" is for conversations with tools, and "default" for others. An answer ends
    with the tokenizer's token that the template writes after it, with its `eos_token`, or with a
    stop token of `generation_config.json`.

    Args:
        folder: The folder, with a `tokenizer.json`.
        name: The name of one of several templates; None for the rule above.
        variables: Values of further names that the source reads, such as `enable_thinking`.

    Returns:
        The template; its masks are those of `make_jinja_template`.

    Raises:
        DataError: The folder has no tokenizer, no template, or none of that name; or a file of it
            is invalid. The message says which.
        ValueError: A template is no Jinja, accesses files or Python's internals, or ends an answer
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
    tokens = _read_special_texts(path)
    sources = read_template_sources(path)
    # A name that does not exist has None as its source, which is rejected below.
    selected = sources if name is None else {name: sources.get(name)}
    if not sources or None in selected.values():
        missing = f"no chat template {name!r}" if sources else "no chat template"
        raise DataError(
            f"read_template: {path} has {missing}; it has {', '.join(sources) or 'none'}",
            where=path,
            hint=f"if the model was trained with one of {', '.join(TEMPLATES)}, take that",
        )
    stops = [tokenizer.backend.id_to_token(i) for i in read_stop_ids(path)]
    # A model may stop at a token that its tokenizer does not mark as special.
    known_tokens = {*tokenizer.special_ids, *(stop for stop in stops if stop)}
    ends = {text for text in (*stops, tokens.get("eos_token")) if text}
    templates = {
        each: _make_template(
            f"{path}: {each}", str(source), known_tokens, ends, {**tokens, **(variables or {})}
        )
        for each, source in selected.items()
    }
    # The only one, whatever its name.
    if len(templates) == 1:
        return next(iter(templates.values()))
    return partial(_render_with_choice, templates=templates)


def _read_special_texts(path: Path) -> dict[str, str]:
    """Return the texts of a folder's special tokens by their names, such as "eos_token"."""
    settings = read_tokenizer_settings(path / "tokenizer.json")
    texts = {}
    # A token is a text, or an object with its flags and its text as `content`.
    for key, value in settings.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if key.endswith("_token") and isinstance(text, str):
            texts[key] = text
    return texts


def read_stop_ids(folder: str | os.PathLike[str]) -> tuple[int, ...]:
    """Read the stop ids of a folder's model: `eos_token_id` of `generation_config.json`.

    If that has none, those of `config.json`.

    Returns:
        The ids, an empty tuple if neither file has any.

    Raises:
        DataError: A file is no JSON, or the ids are no numbers.

    Examples:
        >>> read_stop_ids("/does/not/exist")
        ()
    """
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        ids = read_json_object(path).get("eos_token_id") if path.is_file() else None
        if ids is None:
            continue
        stop_ids = ids if isinstance(ids, list) else [ids]
        # `isinstance` would take `true` for an id.
        if not all(type(i) is int and i >= 0 for i in stop_ids):
            raise DataError(f"{path}: eos_token_id is {ids!r:.60}, no id", where=path)
        return tuple(stop_ids)
    return ()


def _make_template(
    name: str,
    source: str,
    known_tokens: set[str],
    ends: set[str],
    variables: Mapping[str, Any],
) -> Template:
    """Make a template that ends an answer with a known token, or one that the model stops at."""
    probe = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARKER}]
    bos_token = variables.get("bos_token")
    eos_token = variables.get("eos_token")
    # Rendered once with any stop, to see which token follows an answer.
    render = make_jinja_template(
        source, bos_token=bos_token, eos_token=eos_token, stop=MARKER, variables=variables
    )
    try:
        rendered = "".join(segment.text for segment in render(probe))
        after = rendered.rpartition(MARKER)[2].lstrip()
    except DataError:  # the template rejects the conversation of the test
        after = ""
    # The longest of them: a token may begin with another one.
    following = {token for token in known_tokens if after.startswith(token)}
    stops = ends | {max(following, key=len)} if following else ends
    if not stops:
        raise ValueError(
            f"read_template: {name} ends an answer with no token of the tokenizer, and no "
            "eos_token is named; set it in tokenizer_config.json"
        )
    return make_jinja_template(
        source, bos_token=bos_token, eos_token=eos_token, stop=sorted(stops), variables=variables
    )


def _render_with_choice(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    templates: Mapping[str, Template],
) -> list[Segment]:
    name = "tool_use" if tools is not None and "tool_use" in templates else "default"
    if name not in templates:
        raise DataError(
            f"read_template: none of the templates is the default; name one: {', '.join(templates)}"
        )
    return templates[name](messages, tools=tools, add_generation_prompt=add_generation_prompt)


def read_template_sources(path: Path) -> dict[str, Any]:
    """Read the chat templates of a Hugging Face folder as Jinja texts, by their names.

    Raises:
        DataError: A file of it is no JSON, or has an invalid template.

    Examples:
        >>> read_template_sources(Path("/does/not/exist"))
        {}
    """
    # In one file for each, as newer versions of `transformers` write them.
    files = {"default": path / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((path / MORE_TEMPLATES).glob("*.jinja"))}
    sources: dict[str, Any] = {}
    for name, file in files.items():
        if not file.exists():
            continue
        try:
            data = read_limited(file, max_bytes=_MAX_BYTES)
        except OSError as error:
            raise DataError(f"{file}: {error.strerror}", where=file) from error
        sources[name] = data.decode(errors="replace")
    setting: Any = read_tokenizer_settings(path / "tokenizer.json").get("chat_template")
    # Where `transformers` saved the template of a processor of images and text.
    if not sources and setting is None and (path / "chat_template.json").is_file():
        setting = read_json_object(path / "chat_template.json").get("chat_template")
    if sources or setting is None:
        return sources
    # The setting is one text, or a list of texts with names.
    rows = setting if isinstance(setting, list) else [{"name": "default", "template": setting}]
    valid = [row for row in rows if isinstance(row, dict)]
    sources = {str(row.get("name")): row.get("template") for row in valid}
    are_texts = all(isinstance(text, str) for text in sources.values())
    if len(valid) != len(rows) or not are_texts:
        raise DataError(
            f"read_template: {path}: chat_template must be a text, or a list of named ones",
            where=path,
        )
    return sources
