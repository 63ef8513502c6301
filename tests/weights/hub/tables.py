"""The tables of the supported families in the pages, made from the declarations and the tests."""

from weights.hub import published, tiny

from trainkit import hub

TOLERANCE = 1e-5
"""The largest difference from `transformers` in fp32, max|a - b| / max|b|."""

_KINDS = {
    "tower": "the text tower of multimodal models",
    "delta": "with the gated delta rule",
    "experts": "with experts",
    "": "dense",
}


def make_family_table():
    """Return the table of all families: what each is known by, and what was compared."""
    transformers = tiny.load_transformers()
    rows = {family.model_type: [] for family in hub.FAMILIES}
    for kind, changes, *outer in (tiny.ROWS | tiny.TOWERS).values():
        config = getattr(transformers, f"{kind}Config")
        tied = [*outer, changes][0].get("tie_word_embeddings", config.tie_word_embeddings)
        rows[config.model_type].append(tied)
    forms = {family.model_type: [] for family in hub.FAMILIES}
    towers = {name: values for name, (values, *_) in published.TOWERS.items()}
    for name, values in [*published.FORMS.items(), *towers.items()]:
        forms[values["model_type"]].append(name)
    head = ["`model_type`", "models", "logits, gradients", "packed", "greedy text", "export"]
    lines = [[*head, "small models", "`config.json` as published"], ["---"] * 8]
    # A text tower that no folder has alone is compared with the model around it.
    towers = {family.tower.model_type for family in hub.FAMILIES if family.tower}
    for family in hub.FAMILIES:
        tied = rows[family.model_type]
        if not tied and family.model_type in towers:
            continue
        # With a state that goes from one document to the next there, each is compared alone.
        packed = f"{TOLERANCE:g}{', each alone' * (_kind_of(family) == 'delta')}"
        lines.append(
            [
                f"`{family.model_type}`",
                family.models,
                f"{TOLERANCE:g}",
                packed,
                "equal",
                "equal",
                f"{len(tied) - sum(tied)} + {sum(tied)} tied",
                ", ".join(forms[family.model_type]) or "none",
            ]
        )
        assert family.models, family.model_type
        assert tied, family.model_type
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def make_short_family_table():
    """Return the table of the README: the models of each kind."""
    lines = ["| decoders | families |", "|---|---|"]
    for kind, title in reversed(_KINDS.items()):
        models = [family.models for family in hub.FAMILIES if _kind_of(family) == kind]
        if models:
            lines.append(f"| {title} | {', '.join(models)} |")
    return "\n".join(lines)


def _kind_of(family):
    if family.tower is not None:
        return "tower"
    fields = [*family.keys.values(), *family.fixed]
    return next(
        kind
        for kind in _KINDS
        if not kind or any(str(getattr(x, "field", x)).startswith(f"{kind}.") for x in fields)
    )
