"""Multi-head latent attention: queries, keys and values are projections of low-rank latents.

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
    """Attention whose queries, keys and values are projections of latents that all heads share.

    A head of `wq` has the rows of the part without positions, then those of the rotary part; a head
    of `wkv` those of the keys without positions, then those of the values. The number of heads
    follows from the shapes of the weights, so the module also works on a shard of them. The modules
    before `wq` and `wkv` act on tokens: under sequence-parallel norms they see this rank's tokens,
    and tensor parallelism gathers the outputs of the norms and of `k_rotary`.
    """

    def __init__(
        self, config: DecoderConfig, *, attend: Attend, window: int | None, scale: float | None
    ) -> None:
        super().__init__()
        assert config.latents is not None
        latents = config.latents
        width = config.width
        heads = config.heads
        self.latents = latents
        self.attend = attend
        self.scale = scale  # None: the kernel's default, 1 / sqrt(head_size)
        self.window = window
        self.softcap = config.score_softcap
        # Kernels have a maximum head size, which queries, keys and values must respect.
        self.widest_head = max(config.head_size, latents.values)
        self.q_latent: nn.Module = nn.Identity()
        self.q_latent_norm: nn.Module = nn.Identity()
        if latents.query_rank is not None:
            self.q_latent = Linear(width, latents.query_rank, bias=False)
            self.q_latent_norm = make_norm(config, latents.query_rank, eps=latents.norm_eps)
        # Heads of `wq` and `wkv` differ in their rows; tensor parallelism splits between heads.
        self.wq = Linear(latents.query_rank or width, heads * config.head_size, bias=False)
        self.wq.head_size = config.head_size
        self.kv_latent = Linear(width, latents.kv_rank, bias=False)
        self.kv_latent_norm = make_norm(config, latents.kv_rank, eps=latents.norm_eps)
        self.wkv = Linear(latents.kv_rank, heads * (latents.plain + latents.values), bias=False)
        self.wkv.head_size = latents.plain + latents.values
        # Muon orthogonalizes the matrices of keys and of values apart.
        self.wkv.parts = latents.plain, latents.values
        self.k_rotary = Linear(width, latents.rotary, bias=False)
        self.wo = Linear(heads * latents.values, width, bias=False)

    def forward(
        self,
        x: Tensor,
        *,
        rotary: Table | None,
        spans: Spans,
        attend: Attend | None = None,
    ) -> Tensor:
        """Map `[B, S, D]` to `[B, S, D]`; `attend`, that of a cache, replaces the module's own."""
        assert rotary is not None
        latents = self.latents
        # Down to the latents, [B, S, rank], and up to the heads of this rank, [B, S, H, *].
        q = self.wq(self.q_latent_norm(self.q_latent(x)))
        q = q.unflatten(-1, (-1, self.wq.head_size))
        kv = self.wkv(self.kv_latent_norm(self.kv_latent(x)))
        kv = kv.unflatten(-1, (-1, self.wkv.head_size))
        q_plain, q_rotary = q.split([latents.plain, latents.rotary], -1)
        k_plain, v = kv.split([latents.plain, latents.values], -1)
        # One rotary part of the keys, [B, S, 1, R], for all heads of this rank.
        k_rotary = rotate(self.k_rotary(x).unsqueeze(2), *rotary)
        k_rotary = k_rotary.expand(-1, -1, q.shape[2], -1)
        q = torch.cat([q_plain, rotate(q_rotary, *rotary)], -1)
        k = torch.cat([k_plain, k_rotary], -1)
        attend = attend or self.attend
        out = attend(
            q,
            k,
            v,
            spans=spans,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
        )
        return self.wo(out.flatten(2))
