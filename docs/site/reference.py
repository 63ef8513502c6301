"""The API reference as pages for mkdocstrings: one page a module, one entry a public name.

Everything is read from the source, without an import. docs/site/build.py calls this.
"""
# ruff: noqa: INP001 -- no package: a script imports this, and griffe the extension

from __future__ import annotations

from pathlib import Path

import griffe

Rooms = dict[str, tuple[griffe.Module, dict[str, griffe.Object]]]
RECORDS = {"attrs.frozen", "attrs.define", "NamedTuple"}
EITHER = griffe.ParameterKind.positional_or_keyword
ABOUT = "Every public name, by module, with its signature, an example and its source."
ABOUT_TK = "`import trainkit as tk` is quick, since a name is loaded at first use."


class AttrsInit(griffe.Extension):
    """Give records (of attrs, or named tuples) the constructor that they will have."""

    def on_class(self, *, cls: griffe.Class, **_: object) -> None:
        """Add `__init__`, whose parameters are the annotated fields in order."""
        made_by = {str(d.value).partition("(")[0] for d in cls.decorators} | {*map(str, cls.bases)}
        if "__init__" in cls.members or not made_by & RECORDS:
            return
        fields = [a for a in cls.attributes.values() if a.annotation is not None]
        parameters = griffe.Parameters(griffe.Parameter("self", kind=EITHER))
        for field in fields:
            name, type_, default = field.name.lstrip("_"), field.annotation, _default_of(field)
            parameters.add(griffe.Parameter(name, annotation=type_, kind=EITHER, default=default))
        cls.set_member("__init__", griffe.Function("__init__", parameters=parameters, parent=cls))


def _default_of(field: griffe.Attribute) -> griffe.Expr | str | None:
    """Return the default of a field, dots where a function makes it, None where it has none."""
    value = field.value
    if not isinstance(value, griffe.ExprCall) or str(value.function) != "attrs.field":
        return value
    given = {a.name: a.value for a in value.arguments if isinstance(a, griffe.ExprKeyword)}
    return given.get("default", "..." if "factory" in given else None)


def load(root: Path) -> griffe.Module:
    """Return the package in a folder."""
    return griffe.load("trainkit", search_paths=[root], try_relative_path=False)


def read_rooms(module: griffe.Module) -> Rooms:
    """Return {room: (its module, {name: what it stands for})} of a package, inner ones too.

    A room is a module with names of its own in its table of contents, or a file that a table lists.
    """
    found, names = {}, {}
    table = {n: path for n, path in module.imports.items() if path.startswith("trainkit.")}
    if not module.is_init_module:  # a room of one file has what is written there
        public = [m for m in module.members.values() if not m.is_alias and m.name[0] != "_"]
        table = {m.name: m.path for m in public if not m.is_attribute or m.docstring}
    for name in sorted(module.exports or table, key=str.lower):
        target = _resolve(module.package, table.get(name, f"{module.path}.{name}"))
        if target.is_module:
            found |= read_rooms(target)
        else:
            names[name] = target
    return found | ({module.path: (module, names)} if names else {})


def _resolve(package: griffe.Module, path: str) -> griffe.Object:
    """Return what a table means: a function and its file may have one name."""
    parent, _, name = path.partition(".")[2].rpartition(".")
    further = (package[parent] if parent else package).imports.get(name, path)
    return package[path.partition(".")[2]] if further == path else _resolve(package, further)


def write_pages(rooms: Rooms) -> dict[str, str]:
    """Return {file: Markdown}: index.md, and a page a room."""
    tk, inner = rooms["trainkit"][1], sorted(rooms.keys() - {"trainkit"})
    pages, where, about = {}, {}, []
    for room in inner:
        module, names = rooms[room]
        file, home = f"{room.partition('.')[2]}.md", dict.fromkeys(names, room)
        paths = {item.path for item in names.values()}
        home |= {name: "trainkit" for name, item in tk.items() if item.path in paths}
        where = {path: f"{file}#{path}" for path in paths} | where
        entries = [
            f"::: {(names | tk)[name].path}\n    options:\n      extra:\n        home: {home[name]}"
            for name in sorted(home, key=str.lower)
        ]
        pages[file] = "\n\n".join([f"# {room}", module.docstring.value, *entries]) + "\n"
        links = ", ".join(f"[`{n}`]({where[item.path]})" for n, item in names.items())
        about += [f"### [{room}]({file})", _sentence(module), links]
    lines = [f"- [`tk.{n}`]({where[i.path]}): {_sentence(i)}" for n, i in tk.items()]
    first = ["# Reference", ABOUT, "## Names of `tk`", ABOUT_TK, "\n".join(lines), "## Modules"]
    return {"index.md": "\n\n".join([*first, *about]) + "\n"} | pages


def _sentence(item: griffe.Object) -> str:
    return " ".join(item.docstring.value.partition("\n\n")[0].split())
