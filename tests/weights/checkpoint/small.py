"""A small run in one process, its checkpoints, and their files rewritten as an attacker would."""

import json

import torch
from torch import nn

import trainkit as tk
from trainkit.types import Cursor
from trainkit.weights.checkpoint.manifest import dump_json, seal
from trainkit.weights.checkpoint.safe_files import hash_file


def quiet(_):
    pass


def small_model(*, width=3, bias=True):
    torch.manual_seed(0)
    return nn.Linear(width, 2, bias=bias)


def small_run(*, steps=1, model=None, **options):
    """Return the arguments of a checkpoint: counters, stages, optimizer, layout."""
    model = small_model(**options) if model is None else model
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.1)
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn_like(p) if p.requires_grad else None
        optimizer.step()
        optimizer.zero_grad()
    state = tk.TrainState(step=steps, tokens=torch.tensor(7), cursor=Cursor(steps, (1, 2)))
    return state, [model], optimizer, tk.solo_parallel()


def live(stages, optimizer):
    """Return copies of everything that a load may write, to compare afterwards."""
    model = {name: x.detach().clone() for name, x in stages[0].state_dict().items()}
    memory = {
        (i, key): value.clone() if isinstance(value, torch.Tensor) else value
        for i, state in enumerate(optimizer.state.values())
        for key, value in state.items()
    }
    return model | memory


def same(before, after):
    if before.keys() != after.keys():
        return False
    pairs = [(before[key], after[key]) for key in before]
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def reseal(path, **changes):
    """Write a manifest that matches a checkpoint's files, as anybody with write access can."""
    manifest = json.loads((path / "manifest.json").read_text())
    names = sorted(file.name for file in path.iterdir() if file.name != "manifest.json")
    files = {name: hash_file(path / name) for name in names}
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    (path / "manifest.json").write_bytes(dump_json(seal(body | {"files": files} | changes)))


def rewrite(path, name, change):
    """Change a JSON file of a checkpoint in place, and seal the manifest again."""
    value = json.loads((path / name).read_text())
    change(value)
    (path / name).write_text(json.dumps(value))
    reseal(path)
