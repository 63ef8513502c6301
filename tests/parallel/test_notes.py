"""Notes on modules and parameters."""

import copy
import re
from pathlib import Path

import torch
from torch import nn

import trainkit
from trainkit.parallel.notes import Note

WIDTH = Note("width", default=0)


def test_a_note_is_read_where_it_was_written_and_nowhere_else():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    WIDTH.write_(model[0], 3)
    WIDTH.write_(model[1].weight, 4)
    assert [WIDTH.read(x) for x in (model, *model, *model.parameters())] == [0, 3, 0, 0, 0, 4, 0]
    assert [WIDTH.is_on(x) for x in (model, *model)] == [False, True, False]
    assert WIDTH.read_all(model) == [3]
    WIDTH.write_(model[0], 5)
    assert WIDTH.read_all(model) == [5]


def test_a_note_stays_out_of_the_state_and_goes_with_a_copy():
    layer = nn.Linear(1, 1)
    WIDTH.write_(layer, 3)
    assert [*layer.state_dict()] == ["weight", "bias"]
    assert WIDTH.read(copy.deepcopy(layer)) == 3


def test_a_wrapper_of_torch_compile_shows_the_note_of_its_module_which_counts_once():
    layer = nn.Linear(1, 1)
    WIDTH.write_(layer, 3)
    wrapped = torch.compile(layer, backend="eager")
    assert WIDTH.read(wrapped) == 3
    assert not WIDTH.is_on(wrapped)
    assert WIDTH.read_all(wrapped) == [3]


def test_every_note_has_its_own_name_and_no_other_file_writes_marks():
    package = Path(trainkit.__file__).parent
    texts = {path.name: path.read_text() for path in package.rglob("*.py")}
    marks = {name for name, text in texts.items() if re.search(r"\"_trainkit_", text)}
    assert marks == {"notes.py"}
    names = re.findall(r"\bNote(?:\[.*\])?\(\s*\"(\w+)\"", "\n".join(texts.values()))
    assert len(names) > 10
    assert len(names) == len(set(names))
