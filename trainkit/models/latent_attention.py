"""Multi-head latent attention: the heads' queries, keys and values are made of narrow latents.

DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainkit.models.config import DecoderConfig
from trainkit.models.layers import Linear, make_norm
from trainkit.models.rotary import Table, rotate
from trainkit.types import Attend, Spans


class LatentAttention(nn.Module):
    """Attention whose queries, keys and values are made of latents that all heads share.

    Rows of `wq` are heads of a part without positions and then a rotary one; rows of `wkv` are
    heads of the keys' part without positions and then the values. How many there are follows from
    the weights, so it may hold a shard of them. What comes before `wq` and `wkv` belongs to tokens,
    and may see a part of them where tensor parallelism gathers what the norms and `k_rotary` give.
    """

    def __init__(self, config: DecoderConfig, *, attend: Attend, window: int | None) -> None:
        super().__init__()
        assert config.latents is not None
        made, width, heads = config.latents, config.width, config.heads
        self.latents, self.attend, self.scale = made, attend, config.score_scale
        self.window, self.softcap = window, config.score_softcap
        self.widest_head = max(config.head_size, made.values)
        self.q_latent: nn.Module = nn.Identity()
        self.q_latent_norm: nn.Module = nn.Identity()
        if made.query_rank is not None:
            self.q_latent = Linear(width, made.query_rank, bias=False)
            self.q_latent_norm = make_norm(config, made.query_rank)
        self.wq = Linear(made.query_rank or width, heads * config.head_size, bias=False)
        self.kv_latent = Linear(width, made.kv_rank, bias=False)
        self.kv_latent_norm = make_norm(config, made.kv_rank)
        self.wkv = Linear(made.kv_rank, heads * (made.plain + made.values), bias=False)
        self.wq.head_size, self.wkv.head_size = config.head_size, made.plain + made.values
        self.wkv.parts = made.plain, made.values
        self.k_rotary = Linear(width, made.rotary, bias=False)
        self.wo = Linear(heads * made.values, width, bias=False)

    def forward(
        self,
        x: Tensor,
        *,
        rotary: Table | None,
        spans: Spans,
        attend: Attend | None = None,
    ) -> Tensor:
        """Map `[B, S, D]` to `[B, S, D]`; `attend`, a cache's, takes the place of its own."""
        assert rotary is not None
        q = self.wq(self.q_latent_norm(self.q_latent(x))).unflatten(-1, (-1, self.wq.head_size))
        kv = self.wkv(self.kv_latent_norm(self.kv_latent(x)))
        q_plain, q_turned = q.split([self.latents.plain, self.latents.rotary], -1)
        k_plain, v = kv.unflatten(-1, (-1, self.wkv.head_size)).split(
            [self.latents.plain, self.latents.values], -1
        )
        k_turned = rotate(self.k_rotary(x).unsqueeze(2), *rotary).expand(-1, -1, q.shape[2], -1)
        q = torch.cat([q_plain, rotate(q_turned, *rotary)], -1)
        k = torch.cat([k_plain, k_turned], -1)
        how = {"scale": self.scale, "window": self.window, "softcap": self.softcap}
        return self.wo((attend or self.attend)(q, k, v, spans=spans, **how).flatten(2))
