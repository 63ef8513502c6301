"""Keys of the stochastic rounding of a parameter's rows, and of its moments' rows, to bf16."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor, nn

from trainkit.noise.hashing import make_key
from trainkit.noise.rounding import keys_at, round_rows, rounding_keys
from trainkit.parallel.parameters import get_local_box


@attrs.frozen(eq=False)
class Rows:
    """The keys of the rows in this rank's shard of a parameter.

    They depend on the seed, the parameter's name and the indices of the rows in the full parameter,
    so not on the layout. Two moments share keys and use half of the random bits each, so parameter
    and moments are rounded independently.
    """

    p: nn.Parameter
    shape: torch.Size
    seed: int
    name: str
    # One key for each row of the local shard, `[rows]`; the arrays share the memory of the tensors.
    own: Tensor
    moments: Tensor
    own_array: Any
    moments_array: Any
    # The length of a local row, and the index of its first column in the full row.
    columns: int
    first: int

    @classmethod
    def of(cls, p: nn.Parameter, seed: int, name: str) -> Rows:
        """Make the keys of a parameter.

        Examples:
            >>> Rows.of(nn.Parameter(torch.ones(3, 4)), 0, "up.weight").own.shape
            torch.Size([3])
        """
        box = get_local_box(p)
        # A scalar is one row of one number.
        shape = tuple(box.local.shape) or (1,)
        offset = tuple(box.offset) or (0,)
        own = rounding_keys(make_key(seed, "rounding", name), shape, offset)
        moments = rounding_keys(make_key(seed, "rounding of moments", name), shape, offset)
        on_host = p.device.type == "cpu"  # where compiled loops read them as arrays
        return cls(
            p=p,
            shape=p.shape,
            seed=seed,
            name=name,
            own=own.to(p.device),
            moments=moments.to(p.device),
            own_array=own.numpy().view(np.uint32) if on_host else None,
            moments_array=moments.numpy().view(np.uint32) if on_host else None,
            columns=shape[-1],
            first=offset[-1],
        )

    def are_of(self, p: nn.Parameter, seed: int, name: str) -> bool:
        """Return whether these are the keys of a parameter, with the same seed and name."""
        # Keys are cached by the parameter's id, which another parameter may have got since.
        return (
            self.p is p
            and self.seed == seed
            and self.name == name
            and self.shape == p.shape
            and self.own.device == p.device
        )

    def round(self, x: Tensor, keys: Tensor, step: Any, *, lower: bool = False) -> Tensor:
        """Round the flat values of all rows to bf16, by the keys and the step."""
        return round_rows(
            x.to(torch.float32),
            keys_at(keys, step),
            columns=self.columns,
            begin=0,
            first=self.first,
            lower=lower,
        )
