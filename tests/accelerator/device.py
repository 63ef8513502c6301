"""A CUDA device that is none: tensors on it are fake, and what would be done with it is noted.

Shapes, dtypes and devices are checked and every branch for CUDA is taken, in torch's C++ too (see
stubs.c); values, times, races between streams and NCCL itself are not to be seen.
"""

import contextlib
import sys
from collections import Counter
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import _utils as utils
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

# What the host waits for the device for, besides copies.
WAITS = {
    "_local_scalar_dense": "item",
    "nonzero": "nonzero",
    "masked_select": "masked_select",
    "_unique2": "unique",
    "equal": "equal",
    "repeat_interleave": "repeat_interleave",
}
SILENT = {"empty", "empty_like", "empty_strided", "new_empty", "detach"}  # they launch nothing


class Fake(FakeTensorMode):
    """Fake tensors, of which `torch.tensor(..., device=)` makes one on the host and then copies."""

    @property
    def avoid_device_init(self):
        return True


class Ledger(TorchDispatchMode):
    """What a call does with the device, by the innermost function of trainkit that asks for it."""

    def __init__(self):
        super().__init__()
        self.clear()

    def clear(self):
        self.syncs, self.operators, self.collectives = Counter(), Counter(), Counter()

    def wait(self, what):
        self.syncs[f"{what} in {place()}"] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if is_tensor(x)]
        on_device = any(x.is_cuda for x in tensors)
        if func.namespace in {"c10d", "_c10d_functional"} and tensors:
            kinds = {(x.device.type, x.dtype) for x in tensors}
            self.collectives.update((name, kind, place()) for kind in kinds)
        is_told = kwargs.get("output_size") is not None  # repeat_interleave asks for it else
        if on_device and name in WAITS and not is_told:
            self.wait(WAITS[name])
            if name in {"_local_scalar_dense", "equal"}:  # any value will do
                return 1.0 if tensors[0].is_floating_point() else 1
        if on_device and name == "index" and any(is_mask(x) for x in args[1]):
            self.wait("mask")
        copied = copy_of(name, args, kwargs)
        if copied is not None and "cuda" in copied and "cpu" in copied:
            self.wait("copy from device" if copied[0] == "cuda" else "copy to device")
        out = func(*args, **kwargs)
        if launches(func, name, out):
            self.operators[name] += 1
        return out


def is_tensor(x):
    return isinstance(x, torch.Tensor)


def is_mask(x):
    return x is not None and x.dtype in {torch.bool, torch.uint8}


def copy_of(name, args, kwargs):
    """Return the devices (from, to) of a copy that the host waits for, or None."""
    if name == "_to_copy" and not kwargs.get("non_blocking"):
        return args[0].device.type, torch.device(kwargs.get("device") or args[0].device).type
    if name == "copy_" and not (args[2:] or [kwargs.get("non_blocking")])[0]:
        return args[1].device.type, args[0].device.type
    return None


def launches(func, name, out):
    if name.startswith("_foreach") or "fused" in name:
        return True
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    made = [x for x in torch.utils._pytree.tree_leaves(out) if is_tensor(x)]
    return not view and name not in SILENT and any(x.is_cuda for x in made)


def place():
    """Return where in trainkit or in a recipe the running operator is asked for."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        for folder in ("/trainkit/", "/recipes/"):
            if folder in file and "/site-packages/" not in file:
                return f"{file.rpartition(folder)[2]}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


def to_empty(self, *, device):
    """Give a module memory as torch's does, which swaps tensors: fake ones have weak references."""
    given = {}
    for module in self.modules():
        for kept in (module._parameters, module._buffers):
            for name, x in kept.items():
                if x is not None:
                    made = torch.empty_like(x.data, device=device)
                    if isinstance(x, torch.nn.Parameter):
                        made = torch.nn.Parameter(made, requires_grad=x.requires_grad)
                    kept[name] = given.setdefault(id(x), made)
    return self


def swap_tensors(old, new):
    """Change a parameter as torch.utils.swap_tensors does, which refuses weak references."""
    old.data = new.data


@contextlib.contextmanager
def fake_device():
    """Yield the ledger of a block in which tensors are fake, on any device."""
    ledger = Ledger()

    def really(offset_of):  # arithmetic on numbers of the host
        def call(*args, **kwargs):
            with _disable_current_modes():
                return offset_of(*args, **kwargs)

        return call

    name = "compute_local_shape_and_global_offset"
    with (
        mock.patch.object(utils, name, really(getattr(utils, name))),
        mock.patch.object(utils, f"_{name}", really(getattr(utils, f"_{name}"))),
        mock.patch.object(torch.nn.Module, "to_empty", to_empty),
        mock.patch.object(torch.utils, "swap_tensors", swap_tensors),
        Fake(allow_non_fake_inputs=True),
        ledger,
    ):
        yield ledger
