"""Mistakes that a test must notice: each is a patch of the source, and the test that goes red.

`run.py` plants them one at a time; `test_table.py` looks that every row still has its place.
"""

from __future__ import annotations

from typing import NamedTuple


class Mistake(NamedTuple):
    """`old`, which stands in `file` exactly once, becomes `new`; `test` is what pytest is given."""

    file: str
    what: str
    old: str
    new: str
    test: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


def _in(folder: str, *rows: tuple[str, str, str, str, str]) -> list[Mistake]:
    return [Mistake(f"{folder}/{file}", *rest) for file, *rest in rows]


PACKING = _in(
    "trainkit/packing",
    (
        "fits.py",
        "a bin is one piece fuller than allowed",
        "        room += opens & (limit - 1 - room)",
        "        room += opens & (limit - room)",
        "tests/families/test_packing.py",
    ),
    (
        "fits.py",
        "first fit goes right where the left has room",
        "                    if tree[node] < length:",
        "                    if tree[node] <= length:",
        "tests/families/test_packing.py",
    ),
    (
        "fits.py",
        "a bin counts one piece where it has taken several",
        "            room[bin_] -= taken",
        "            room[bin_] -= 1",
        "tests/families/test_packing.py",
    ),
    (
        "fits.py",
        "best fit files a run where it has no space",
        'np.searchsorted(sizes, space[run], "right") - 1',
        'np.searchsorted(sizes, space[run], "left")',
        "tests/families/test_packing.py",
    ),
    (
        "pieces.py",
        "a document cut into pieces loses the start of the second",
        "                start += capacity\n                piece += 1",
        "                start += capacity - 1\n                piece += 1",
        "tests/families/test_packing.py",
    ),
    (
        "pieces.py",
        "aligned lengths are rounded down",
        "    aligned = lengths + (multiple_of - 1)",
        "    aligned = lengths + 0",
        "tests/families/test_packing.py",
    ),
    (
        "bins.py",
        "pieces of rows that were taken come from the row before",
        "    pieces = np.repeat(begins - offsets[:-1], sizes) + np.arange(offsets[-1])",
        "    pieces = np.repeat(begins - offsets[1:], sizes) + np.arange(offsets[-1])",
        "tests/families/test_packing.py tests/data",
    ),
    (
        "bins.py",
        "rows arrive in the order in which they were shuffled",
        "    bin_of[arrival] = found",
        "    bin_of[:] = found[arrival]",
        "tests/families/test_packing.py",
    ),
)

BATCH = _in(
    "trainkit/batch",
    (
        "loops.py",
        "positions go on from one document to the next",
        "            part[i] = i\n",
        "            part[i] = begins[span] + i\n",
        "tests/test_batch.py",
    ),
    (
        "loops.py",
        "the last token of a document predicts the padding",
        "        labels[begins[span] + max(size - 1, 0) : ends[span]] = IGNORED_LABEL",
        "        labels[begins[span] + size : ends[span]] = IGNORED_LABEL",
        "tests/test_batch.py",
    ),
    (
        "loops.py",
        "a mask of trained tokens is read one token early",
        "        asked_for = trained[first + 1 : first + size]",
        "        asked_for = trained[first : first + size - 1]",
        "tests/test_batch.py",
    ),
    (
        "loops.py",
        "a column of labels is not shifted",
        "(table[SOURCE, span] + shift) * width",
        "table[SOURCE, span] * width",
        "tests/test_batch.py tests/corpora/test_columns.py",
    ),
    (
        "loops.py",
        "aligning padding counts as row padding",
        "        document_ids[end : ends[span]] = -2 - number",
        "        document_ids[end : ends[span]] = -1",
        "tests/test_batch.py",
    ),
    (
        "shards.py",
        "both of a rank's zigzag chunks come back from the front",
        "        places = [*range(0, 2 * count, 2), *range(2 * count - 1, 0, -2)]",
        "        places = [*range(0, 2 * count, 2), *range(1, 2 * count, 2)]",
        "tests/test_shards.py",
    ),
    (
        "shards.py",
        "Ulysses takes its slice before the ring",
        "    ring_part = shard_batch(batch, ring)\n",
        "    ring_part = shard_batch(batch, ring, split=contiguous_shard)\n",
        "tests/test_shards.py",
    ),
    (
        "shards.py",
        "spans of a zigzag part are those of the whole",
        "    spans = spans_of_lengths(batch.spans.lengths // share.count, device",
        "    spans = spans_of_lengths(batch.spans.lengths, device",
        "tests/test_shards.py",
    ),
    (
        "shards.py",
        "a document that goes on in the next row is one span",
        "    begins = np.flatnonzero(begins)",
        "    begins[1:, 0] = False\n    begins = np.flatnonzero(begins)",
        "tests/test_batch.py tests/test_shards.py",
    ),
    (
        "batches.py",
        "microbatches all begin at the first row",
        "        bounds = batch.spans.cu_seqlens[first : end + 1] - part * rows * length",
        "        bounds = batch.spans.cu_seqlens[first : end + 1]",
        "tests/test_batch.py",
    ),
)

SAMPLING = _in(
    "trainkit/sampling",
    (
        "permutation.py",
        "every epoch has the same order",
        "key_of(*key, epoch)) for epoch",
        "key_of(*key)) for epoch",
        "tests/test_sampling.py",
    ),
    (
        "shares.py",
        "rows that fill up a microbatch are the first one again",
        "    positions = np.full(size, -1, np.int64)",
        "    positions = np.zeros(size, np.int64)",
        "tests/test_sampling.py tests/data/test_steps.py",
    ),
    (
        "epochs.py",
        "a batch begins one row late",
        "        return draws(batch * rows_per_step,",
        "        return draws(batch * rows_per_step + 1,",
        "tests/test_sampling.py",
    ),
    (
        "epochs.py",
        "the last step is not a whole one",
        "    steps = rows // rows_per_step\n",
        "    steps = -(-rows // rows_per_step)\n",
        "tests/test_sampling.py",
    ),
)

LOSSES = _in(
    "trainkit/losses",
    (
        "terms.py",
        "a loss is a mean where it is a sum",
        "    total = linear_sum(factors, labels, axis=axis)\n",
        "    total = linear_sum(factors, labels, axis=axis) / (labels >= 0).sum().clamp(min=1)\n",
        "tests/families/test_losses.py",
    ),
    (
        "terms.py",
        "the second loss of a sum loses its weight",
        "        first, *rest = (weight * total for (total, _), weight in parts)",
        "        first, *rest = (w ** (i == 0) * t for i, ((t, _), w) in enumerate(parts))",
        "tests/families/test_losses.py",
    ),
    (
        "terms.py",
        "a term with a count of its own is divided by all tokens",
        "        return total / (divisor_of(name, divisors) if count is None else count)",
        "        return total / divisor_of(name, divisors)",
        "tests/families/test_losses.py tests/losses tests/test_metrics.py",
    ),
    (
        "linear.py",
        "terms of a token without a label are counted",
        "    values = [term(scores, known).masked_fill(ignored, 0) for term, _ in terms]",
        "    values = [term(scores, known) for term, _ in terms]",
        "tests/families/test_losses.py",
    ),
    (
        "policy.py",
        "the clipped ratio takes the larger side",
        "        return -torch.minimum(plain, bounded), bounded < plain",
        "        return -torch.maximum(plain, bounded), bounded < plain",
        "tests/losses tests/families/test_losses.py",
    ),
    (
        "policy.py",
        "the lower bound of the ratio is the upper one",
        "        bounded = ratios.clamp(1 - low, 1 + high) * advantages",
        "        bounded = ratios.clamp(1 - high, 1 + low) * advantages",
        "tests/losses tests/families/test_losses.py",
    ),
    (
        "policy.py",
        "entropy is punished where it is rewarded",
        "            value = value - entropy_weight * scores.entropies",
        "            value = value + entropy_weight * scores.entropies",
        "tests/losses tests/families/test_losses.py",
    ),
    (
        "policy.py",
        "importance is the sampler over the trainer",
        "    return (old - sampler).exp().clamp(max=most)",
        "    return (sampler - old).exp().clamp(max=most)",
        "tests/losses tests/families/test_losses.py",
    ),
    (
        "policy.py",
        "the importance of an answer is a mean where it is a product",
        '            drift = found.sums["importance"].exp()',
        '            drift = found.means("importance").exp()',
        "tests/families/test_losses.py",
    ),
    (
        "policy.py",
        "k3 has its arguments swapped",
        "    difference = reference - logprobs\n",
        "    difference = logprobs - reference\n",
        "tests/losses tests/families/test_losses.py",
    ),
    (
        "preference.py",
        "IPO's target is 1 / beta",
        "        return (chosen - rejected - 1 / (2 * beta)).square()",
        "        return (chosen - rejected - 1 / beta).square()",
        "tests/losses tests/families/test_losses.py",
    ),
    (
        "preference.py",
        "DPO's label smoothing has the wrong sign",
        "logsigmoid(margin) - smooth * logsigmoid(-margin)",
        "logsigmoid(margin) - smooth * logsigmoid(margin)",
        "tests/losses tests/families/test_losses.py",
    ),
    (
        "preference.py",
        "SimPO's margin is added",
        "        return -logsigmoid(beta * (chosen - rejected) - gamma)",
        "        return -logsigmoid(beta * (chosen - rejected) + gamma)",
        "tests/losses tests/families/test_losses.py",
    ),
    (
        "preference.py",
        "KTO's reference point may be negative",
        '        gain = beta * (ratio - found.means("kl").clamp(min=0))',
        '        gain = beta * (ratio - found.means("kl"))',
        "tests/losses tests/families/test_losses.py",
    ),
    (
        "preference.py",
        "chosen and rejected answers are swapped",
        "    return x[:, ::2], x[:, 1::2]",
        "    return x[:, 1::2], x[:, ::2]",
        "tests/losses tests/families/test_losses.py",
    ),
    (
        "shaping.py",
        "top-p leaves one word less",
        "    out = (rising.softmax(-1).cumsum(-1) <= 1 - p) & (torch.as_tensor(p) < 1)",
        "    out = (rising.softmax(-1).cumsum(-1).roll(1) <= 1 - p) & (torch.as_tensor(p) < 1)",
        "tests/generation/test_sampling.py tests/losses",
    ),
    (
        "shaping.py",
        "top-k leaves one word more",
        "logits.topk(min(k, words)).values[:, -1:]",
        "logits.topk(min(k + 1, words)).values[:, -1:]",
        "tests/generation/test_sampling.py tests/losses",
    ),
    (
        "shaping.py",
        "min-p looks at the least likely word",
        "    least = _column(p) * chances.amax(-1, keepdim=True)",
        "    least = _column(p) * chances.amin(-1, keepdim=True)",
        "tests/generation/test_sampling.py tests/losses",
    ),
    (
        "shaping.py",
        "the gradient of a tempered loss forgets the temperature",
        "    return slopes if _is(how.temperature, 1.0) else slopes.div_(_column(how.temperature))",
        "    return slopes",
        "tests/losses tests/families/test_losses.py",
    ),
    (
        "advantages.py",
        "the deviation of a group is divided by its number",
        "(squares / (counts - 1).clamp(min=1)).sqrt()",
        "(squares / counts).sqrt()",
        "tests/losses/test_advantages.py",
    ),
    (
        "advantages.py",
        "leave one out leaves none out",
        "    others = (sums[groups] - exact) / (counts - 1).clamp(min=1)[groups]",
        "    others = sums[groups] / counts[groups]",
        "tests/losses/test_advantages.py",
    ),
    (
        "advantages.py",
        "a value of the next document is taken for the following one",
        "    goes_on[:, :-1] = steps[:, :-1] & (document_ids[:, :-1] == document_ids[:, 1:])",
        "    goes_on[:, :-1] = steps[:, :-1]",
        "tests/losses/test_advantages.py",
    ),
    (
        "softmax.py",
        "the largest logit is that of this rank",
        "    largest = all_max(each.amax(0), axis)",
        "    largest = each.amax(0)",
        "tests/families tests/losses",
    ),
    (
        "sequences.py",
        "documents of later rows add to those of the first",
        "    first = most * torch.arange(rows, device=ids.device).unsqueeze(1)",
        "    first = 0 * torch.arange(rows, device=ids.device).unsqueeze(1)",
        "tests/losses tests/families/test_losses.py",
    ),
    (
        "weights.py",
        "a document's weights are not summed over the shards of its sequence",
        "    own = all_sum(sums, axis)[units].view(kept.shape)",
        "    own = sums[units].view(kept.shape)",
        "tests/losses/test_weights.py",
    ),
)

ATTENTION = _in(
    "trainkit/attention",
    (
        "blocks.py",
        "a token attends to the one after it",
        ".triu(keys - queries + 1)",
        ".triu(keys - queries + 2)",
        "tests/attention/test_blocks.py tests/attention/test_attention.py",
    ),
    (
        "blocks.py",
        "a window is one token wider",
        "        yield _Chunk(rows, seen, (before < 0) | (before >= block.window))",
        "        yield _Chunk(rows, seen, (before < 0) | (before > block.window))",
        "tests/attention/test_blocks.py tests/attention/test_attention.py",
    ),
    (
        "blocks.py",
        "blocks are merged with equal weights",
        "    weight_a, weight_b = (torch.exp(x - base).unsqueeze(-1) for x in (lse_a, lse_b))",
        "    weight_a, weight_b = (x.mul(0).exp().unsqueeze(-1) / 2 for x in (lse_a, lse_b))",
        "tests/attention/test_blocks.py tests/attention/test_ring.py",
    ),
    (
        "blocks.py",
        "the slope of the soft cap is left out",
        "        d_scores = d_scores if slope is None else d_scores.mul_(slope)",
        "        d_scores = d_scores if True else d_scores.mul_(slope)",
        "tests/attention/test_blocks.py tests/attention/test_attention.py",
    ),
    (
        "blocks.py",
        "the scale is missing from the gradient of scores",
        "        d_scores = d_weights.sub_(means_).mul_(weights).mul_(block.scale)",
        "        d_scores = d_weights.sub_(means_).mul_(weights)",
        "tests/attention/test_blocks.py tests/attention/test_attention.py",
    ),
    (
        "ring.py",
        "keys travel the other way round",
        "    after, before = (axis.index + 1) % axis.count, (axis.index - 1) % axis.count",
        "    after, before = (axis.index - 1) % axis.count, (axis.index + 1) % axis.count",
        "tests/attention/test_ring.py",
    ),
    (
        "ring.py",
        "later queries see the first half of earlier keys alone",
        "            views.append(_View(whole, first, block))",
        "            views.append(_View(whole, second, block))",
        "tests/attention/test_ring.py",
    ),
)

MODELS = _in(
    "trainkit/models",
    (
        "experts.py",
        "experts compute on the jittered tokens",
        "        rows, counts, route = self.dispatch(tokens, kept.indices, kept.counts)",
        "        rows, counts, route = self.dispatch(seen.to(x.dtype), kept.indices, kept.counts)",
        "tests/models/test_experts.py",
    ),
    (
        "experts.py",
        "balance is counted after capacity dropped some",
        "        balance = balance_sum(routing, self._load(routing, spans), experts=how.count)",
        "        balance = balance_sum(routing, self._load(kept, spans), experts=how.count)",
        "tests/models/test_experts.py",
    ),
    (
        "experts.py",
        "the loads that are reported are those of what was kept",
        "torch.stack([balance, z, dropped]), routing.counts.to(z.dtype)])",
        "torch.stack([balance, z, dropped]), kept.counts.to(z.dtype)])",
        "tests/models/test_experts.py",
    ),
    (
        "experts.py",
        "the z loss of routers counts padding",
        "        z = (logits.logsumexp(-1).square() * places).sum()",
        "        z = logits.logsumexp(-1).square().sum()",
        "tests/models/test_experts.py",
    ),
    (
        "routers.py",
        "a bias weighs as well as chooses",
        "    weights = scores.gather(-1, indices)\n    if renormalise:\n",
        (
            "    weights = (scores if bias is None else scores + bias).gather(-1, indices)\n"
            "    if renormalise:\n"
        ),
        "tests/models/test_routers.py tests/models/test_experts.py",
    ),
    (
        "routers.py",
        "groups are chosen by their best expert alone",
        "    best = parted.topk(min(2, parted.shape[-1]), -1).values.sum(-1)",
        "    best = parted.amax(-1)",
        "tests/models/test_routers.py tests/models/test_experts.py",
    ),
    (
        "routers.py",
        "an expert takes one token more than it has room for",
        "    is_kept[ordered.indices] = place < capacity",
        "    is_kept[ordered.indices] = place <= capacity",
        "tests/models/test_routers.py tests/models/test_experts.py",
    ),
    (
        "routers.py",
        "jitter moves tokens up alone",
        "(bits.double() * 2.0**-52 - 1)",
        "(bits.double() * 2.0**-53)",
        "tests/models/test_routers.py tests/models/test_experts.py",
    ),
    (
        "layers.py",
        "gate and up are swapped",
        "        return self.down(self.activation(gate) * up)",
        "        return self.down(self.activation(up) * gate)",
        "tests/hub/test_families.py tests/models/test_decoder.py",
    ),
    (
        "layers.py",
        "an offset norm has no offset",
        "        scale = 1 + self.weight.to(wide)",
        "        scale = self.weight.to(wide)",
        "tests/hub/test_families.py tests/models/test_decoder.py",
    ),
    (
        "rotary.py",
        "sines have the wrong sign",
        "torch.cat((-sin, sin), dim=-1)",
        "torch.cat((sin, -sin), dim=-1)",
        "tests/hub/test_families.py tests/models/test_decoder.py",
    ),
    (
        "rotary.py",
        "linear scaling multiplies frequencies",
        "        return frequencies / scaling.factor\n",
        "        return frequencies * scaling.factor\n",
        "tests/hub/test_families.py tests/models/test_decoder.py",
    ),
)

COMMUNICATION = _in(
    "trainkit",
    (
        "collectives.py",
        "a gathered tensor's gradient is not summed over ranks",
        "        return scatter_sum(d_whole, ctx.axis, dim=ctx.dim), None, None",
        (
            "        part = d_whole.chunk(ctx.axis.count, ctx.dim)[ctx.axis.index]\n"
            "        return part.contiguous(), None, None"
        ),
        "tests/test_collectives.py",
    ),
    (
        "collectives.py",
        "an exchange goes back along the dimensions of the way there",
        "        split, gather = ctx.dims\n",
        "        gather, split = ctx.dims\n",
        "tests/test_collectives.py",
    ),
    (
        "collectives.py",
        "a maximum is a sum",
        "    return _reduced(x, axis, dist.ReduceOp.MAX)",
        "    return _reduced(x, axis, dist.ReduceOp.SUM)",
        "tests/test_collectives.py",
    ),
    (
        "collectives.py",
        "sums overwrite what they were given",
        "    out = x.detach().clone(memory_format=torch.contiguous_format)\n    dist.all_reduce",
        "    out = x.detach().contiguous()\n    dist.all_reduce",
        "tests/test_collectives.py",
    ),
    (
        "collectives.py",
        "sums in bf16 round every rank with one key",
        'rounded_bf16(x, mix_tensor(key ^ signed(key_of("rank", axis.index))))',
        "rounded_bf16(x, mix_tensor(key))",
        "tests/test_collectives.py tests/parallel/test_precision.py",
    ),
    (
        "grads.py",
        "norms over ranks are summed without being squared",
        "    powers = norms.square() if norm_type == 2 else",
        "    powers = norms if norm_type == 2 else",
        "tests/test_grads.py",
    ),
    (
        "grads.py",
        "replicas are counted in the norm",
        "        if not placement.is_replicate() and grad.device_mesh.size(dim) > 1",
        "        if grad.device_mesh.size(dim) > 1",
        "tests/test_grads.py",
    ),
    (
        "grads.py",
        "a group's own limit is forgotten",
        "    return [(list(rest), max_norm), *apart]",
        "    return [(list(rest), max_norm), *((members, max_norm) for members, _ in apart)]",
        "tests/test_grads.py",
    ),
    (
        "grads.py",
        "clipping makes small gradients larger",
        "    by = (limit / (norm + 1e-6)).clamp(max=1.0) if clips",
        "    by = (limit / (norm + 1e-6)) if clips",
        "tests/test_grads.py",
    ),
    (
        "grads.py",
        "a refused step forgets its loss scale",
        "    norms = norms if scale is None else norms / scale\n",
        "    norms = norms if scale is None else norms * scale\n",
        "tests/test_grads.py tests/test_loss_scale.py",
    ),
    (
        "grads.py",
        "the rate's scale of a group is left out",
        '        group["lr"] = lr * group.get("lr_scale", 1)',
        '        group["lr"] = lr',
        "tests/test_grads.py tests/optim/test_table.py",
    ),
    (
        "metrics.py",
        "a counter of tokens counts what is trained as processed",
        '    tokens: Any = state.tokens + metrics["tokens"]',
        "    tokens: Any = state.tokens + processed",
        "tests/test_metrics.py",
    ),
    (
        "metrics.py",
        "the FLOPs of causal attention are those of the full one",
        "seen * (2 * tokens - seen + 1) / 2",
        "seen * (2 * tokens - seen + 1)",
        "tests/test_metrics.py",
    ),
    (
        "metrics.py",
        "the entropy of loads is not of shares",
        "    shares = load / load.double().sum(-1, keepdim=True)",
        "    shares = load / load.double().amax(-1, keepdim=True)",
        "tests/test_metrics.py",
    ),
    (
        "schedules.py",
        "the decay begins at 0",
        "shape((step - first) / (total - first)))",
        "shape(step / total))",
        "tests/test_schedules.py",
    ),
    (
        "schedules.py",
        "warm-up takes one step more",
        "        return min(1.0, (step + 1) / warmup) if warmup else 1.0",
        "        return min(1.0, step / warmup) if warmup else 1.0",
        "tests/test_schedules.py",
    ),
    (
        "schedules.py",
        "the last step is not due",
        "(every > 0 and (step % every == 0 or step == last))",
        "(every > 0 and step % every == 0)",
        "tests/test_schedules.py",
    ),
    (
        "health.py",
        "the spread of spikes is around 0",
        "_median(sorted(abs(value - median) for value in recent))",
        "_median(sorted(abs(value) for value in recent))",
        "tests/test_health.py",
    ),
    (
        "health.py",
        "a bad step is among those that spikes are held against",
        '    elif found.kind not in ("empty", "overflow"):',
        '    if found.kind not in ("empty", "overflow"):',
        "tests/test_health.py",
    ),
    (
        "health.py",
        "a loss scale grows when it overflows",
        "    held = (before + 1.0) * good\n",
        "    held = before + 1.0\n",
        "tests/test_loss_scale.py tests/test_health.py",
    ),
    (
        "health.py",
        "a roll-back is tried once more than allowed",
        "    if rollbacks < policy.max_rollbacks:",
        "    if rollbacks <= policy.max_rollbacks:",
        "tests/test_health.py",
    ),
    (
        "step.py",
        "an evaluation counts the batch that only computes along",
        "torch.zeros_like(term) for name, term in found.items()",
        "term for name, term in found.items()",
        "tests/test_step.py tests/evaluation/test_held_out.py",
    ),
    (
        "step.py",
        "held-out sums are added in fp32",
        "name: x.double() if x.is_floating_point() else x for",
        "name: x for",
        "tests/test_step.py",
    ),
)

NOISE = _in(
    "trainkit/noise",
    (
        "hashing.py",
        "a hash does not see where an element is",
        "            place = mix(key + index * np.uint64(0x9E3779B97F4A7C15))",
        "            place = mix(key)",
        "tests/test_noise.py",
    ),
)

OPTIM = _in(
    "trainkit/optim",
    (
        "rules.py",
        "AdamW corrects its second moment as its first",
        "(1 - second**step) ** -0.5)\n        return (*_decays(group), *rates, group",
        "(1 - first**step) ** -0.5)\n        return (*_decays(group), *rates, group",
        "tests/optim/test_table.py",
    ),
    (
        "rules.py",
        "Lion updates its momentum by the first beta",
        "    return p - lr * decayed(u, p, decay, against), m + (g - m) * new",
        "    return p - lr * decayed(u, p, decay, against), m + (g - m) * mixed",
        "tests/optim/test_table.py",
    ),
    (
        "elementwise.py",
        "steps that only rounding draws by are not counted for moments in few bits",
        'draws = group["rounding"] == "stochastic" or (',
        'draws = group["rounding"] == "stochastic" and (',
        "tests/optim/test_table.py",
    ),
    (
        "rules.py",
        "the mean of ScheduleFree has equal shares",
        "        share = rate**2 / (weight + (weight == 0))",
        "        share = 1 / step",
        "tests/optim/test_table.py",
    ),
    (
        "groups.py",
        "norms and biases decay too",
        "    parts += [(0.0, [x for x in trained if x[1].ndim < 2])]",
        "    parts += [(weight_decay, [x for x in trained if x[1].ndim < 2])]",
        "tests/optim",
    ),
    (
        "muon.py",
        "Nesterov's momentum mixes the wrong way",
        '        mixed = gradient.lerp(buffer, held.group["momentum"])',
        '        mixed = buffer.lerp(gradient, held.group["momentum"])',
        "tests/optim/test_muon.py",
    ),
    (
        "muon.py",
        "a tall matrix is orthogonalised as a wide one",
        "    is_tall = x.shape[-2] > x.shape[-1]",
        "    is_tall = x.shape[-2] < x.shape[-1]",
        "tests/optim/test_muon.py",
    ),
    (
        "muon.py",
        "match_rms scales by the smaller side",
        "0.2 * math.sqrt(max(rows, columns))",
        "0.2 * math.sqrt(min(rows, columns))",
        "tests/optim/test_muon.py",
    ),
)

PARALLEL = _in(
    "trainkit/parallel",
    (
        "recomputing.py",
        "of two results the second is kept",
        "number % self.every[group] == 0",
        "number % self.every[group] == self.every[group] - 1",
        "tests/parallel/test_recompute.py",
    ),
    (
        "cost.py",
        "of two results as dear as each other the second is kept",
        "-inner[key], key[1]))",
        "-inner[key], -key[1]))",
        "tests/parallel/test_recompute.py",
    ),
    (
        "reduction.py",
        "gradients of units are averaged",
        "        module.set_gradient_divide_factor(1.0)\n",
        "        module.set_gradient_divide_factor(2.0)\n",
        "tests/parallel/test_fsdp.py tests/parallel/test_reduction.py",
    ),
    (
        "styles.py",
        "the input's gradient of a column is not summed",
        '_COLUMN = Style(nn.Linear, {"weight": 0, "bias": 0}, enter=sum_grad)',
        '_COLUMN = Style(nn.Linear, {"weight": 0, "bias": 0})',
        "tests/parallel/test_tensor.py",
    ),
    (
        "styles.py",
        "the bias of a scattered row is no partial sum",
        "attrs.evolve(_ROW, leave=_scatter_sequence, partial=True, sequence=True)",
        "attrs.evolve(_ROW, leave=_scatter_sequence, sequence=True)",
        "tests/parallel/test_tensor.py tests/parallel/test_sequence.py",
    ),
    (
        "leaks.py",
        "a leak is looked for in the document that was changed",
        "    seen = slice(half, half + quarter)",
        "    seen = slice(half + quarter, None)",
        "tests/testing/test_packing.py",
    ),
    (
        "leaks.py",
        "a row of two documents is taken for one",
        'bool((batch["document_ids"] > 0).any())',
        'bool((batch["document_ids"] > 1).any())',
        "tests/testing/test_packing.py",
    ),
)

TESTING = _in(
    "trainkit/testing",
    (
        "train.py",
        "a certificate compares the terms that a layout reports alone",
        "            for name in found.terms | wanted.terms",
        "            for name in found.terms",
        "tests/distributed/test_planted_mistakes.py",
    ),
    (
        "packing.py",
        "packed documents are compared with themselves",
        "            own = _outputs(call, model, one)\n",
        "            own = [x[document.row, document.places][None] for x in packed]\n",
        "tests/testing/test_packing.py",
    ),
    (
        "certificate.py",
        "a model that leaks has a green certificate",
        "        return bool(row.error) if row is self.packing else",
        "        return False if row is self.packing else",
        "tests/testing/test_packing.py",
    ),
)

DATA = _in(
    "trainkit",
    (
        "data/steps.py",
        "noise keys of every step are those of the first",
        "seed=noise_seed, batch=cursor.batch)",
        "seed=noise_seed, batch=0)",
        "tests/data tests/test_noise.py",
    ),
    (
        "data/steps.py",
        "every rank reads the stride of the first",
        "np.arange(share.index, len(items), share.count)",
        "np.arange(0, len(items), share.count)",
        "tests/data/test_steps.py",
    ),
    (
        "data/steps.py",
        "an item after an empty one is in its row",
        "rows[np.flatnonzero(corpus.lengths)] = np.arange(len(bins))",
        "rows[: len(bins)] = np.arange(len(bins))",
        "tests/data/test_steps.py",
    ),
    (
        "data/steps.py",
        "held-out rows beyond the first rank's are read twice",
        "np.array_split(np.arange(len(bins)), share.count)[share.index]",
        (
            "np.array_split(np.arange(len(bins)), share.count)[share.index - 1]"
            " if share.index else np.arange(len(bins))"
        ),
        "tests/data tests/evaluation/test_held_out.py",
    ),
    (
        "data/windows.py",
        "a stream that goes on forgets how many tokens it skipped",
        "attrs.evolve(position, token=position.token + take)",
        "attrs.evolve(position, token=take)",
        "tests/data/test_stream.py",
    ),
    (
        "corpora/joined.py",
        "documents of the second corpus are read from the first place",
        "        return self.parts[part].read(document - first, start, length)",
        "        return self.parts[part].read(document - first, 0, length)",
        "tests/corpora/test_joined.py",
    ),
    (
        "chat/turns.py",
        "a message of weight 0 is trained",
        '    return {i for i in chosen if messages[i].get("weight", 1)}',
        "    return set(chosen)",
        "tests/chat/test_chat.py",
    ),
    (
        "chat/turns.py",
        "a token that only begins in an answer is trained",
        "(begins >= begin) & (ends <= end) & (begins < ends)",
        "(begins >= begin) & (begins < end) & (begins < ends)",
        "tests/chat/test_chat.py",
    ),
    (
        "chat/turns.py",
        "the last answer is the first",
        'answers if train == "assistant" else answers[-1:]',
        'answers if train == "assistant" else answers[:1]',
        "tests/chat/test_chat.py",
    ),
)

WEIGHTS = _in(
    "trainkit",
    (
        "checkpoint/manifest.py",
        "a record's own hash is not looked at",
        'return record == sealed({key: value for key, value in record.items() if key != "sha256"})',
        'return "sha256" in record',
        "tests/checkpoint/test_manifest.py",
    ),
    (
        "checkpoint/compare.py",
        "a tensor of another shape is loaded",
        "        if want != found and not may_cast:",
        "        if want[0] != found[0] and not may_cast:",
        "tests/checkpoint/test_load.py",
    ),
    (
        "checkpoint/retention.py",
        "the worst evaluations are kept",
        "    scored.sort(key=lambda entry: entry.score or 0.0)",
        "    scored.sort(key=lambda entry: -(entry.score or 0.0))",
        "tests/checkpoint/test_retention.py",
    ),
    (
        "checkpoint/rollback.py",
        "a roll-back takes a checkpoint of after the bad step",
        "if step_of(path) <= before]",
        "if step_of(path) <= before + 1]",
        "tests/checkpoint/test_rollback.py",
    ),
    (
        "checkpoint/replicas.py",
        "the order of parts does not matter to a digest",
        "        total = total * 3 + (part * weights[: part.numel()]).sum()",
        "        total = total + part.sum()",
        "tests/checkpoint/test_replicas.py",
    ),
    (
        "hub/links.py",
        "rotary rows are taken in halves where they are in pairs",
        "(plain, plain, half, 2), (plain + half, plain + 1, half, 2))",
        "(plain, plain, half, 1), (plain + half, plain + half, half, 1))",
        "tests/hub/test_families.py",
    ),
    (
        "hub/links.py",
        "joined matrices all begin at the first row",
        "        begin = ends.get(there.name, 0) if there.joined else 0",
        "        begin = 0",
        "tests/hub/test_families.py",
    ),
    (
        "adapters/formats.py",
        "nf4's scales have 256 steps",
        "    step = (largest - least) / 255\n",
        "    step = (largest - least) / 256\n",
        "tests/adapters/test_formats.py",
    ),
    (
        "adapters/formats.py",
        "int8 takes the largest number for 128",
        "    scales = largest / 127\n",
        "    scales = largest / 128\n",
        "tests/adapters/test_formats.py",
    ),
    (
        "adapters/lowrank.py",
        "a rank-stabilised adapter is scaled by its rank",
        "        return self.alpha / (self.rank**0.5 if self.rank_stabilised else self.rank)",
        "        return self.alpha / (self.rank if self.rank_stabilised else self.rank)",
        "tests/adapters/test_lora.py",
    ),
    (
        "adapters/lowrank.py",
        "DoRA scales the bias as well",
        "        plain = y if bias is None else y - bias\n",
        "        plain, bias = y, None\n",
        "tests/adapters/test_lora.py tests/adapters/test_peft.py",
    ),
    (
        "adapters/merge.py",
        "DoRA's length is that of the base",
        "        total *= (magnitude / lengths).unsqueeze(-1)",
        "        total *= magnitude.unsqueeze(-1)",
        "tests/adapters/test_merge.py",
    ),
)

AFTER = _in(
    "trainkit",
    (
        "generation/sampling.py",
        "a repetition penalty makes words below 0 likelier",
        "torch.where(logits < 0, logits * penalty, logits / penalty)",
        "logits / penalty",
        "tests/generation/test_sampling.py",
    ),
    (
        "generation/sampling.py",
        "texts of other rows draw the same places",
        'key_of(seed, "generate", row)',
        'key_of(seed, "generate")',
        "tests/generation",
    ),
    (
        "generation/generating.py",
        "a stop token is part of the text",
        '            self.ended = "stop_id"\n',
        '            self.ended = "stop_id"\n            self.ids.append(token)\n',
        "tests/generation/test_generate.py",
    ),
    (
        "evaluation/choices.py",
        "log-probabilities per token are per byte",
        "(logprobs, logprobs / tokens, logprobs / sizes)",
        "(logprobs, logprobs / sizes, logprobs / tokens)",
        "tests/evaluation",
    ),
    (
        "evaluation/score.py",
        "a continuation is scored one token late",
        "        counting = [slice(end - x.scored, end)",
        "        counting = [slice(end - x.scored + 1, end + 1)",
        "tests/evaluation/test_score.py",
    ),
    (
        "evaluation/score.py",
        "an answer is greedy if one of its words is",
        "bool(values[1].all())",
        "bool(values[1].any())",
        "tests/evaluation/test_score.py",
    ),
    (
        "generation/rewards.py",
        "an answer that was cut is checked",
        "        if answer.truncated:\n            continue\n",
        "",
        "tests/generation/test_rollouts.py",
    ),
)

MISTAKES = [
    *PACKING,
    *BATCH,
    *SAMPLING,
    *LOSSES,
    *ATTENTION,
    *MODELS,
    *COMMUNICATION,
    *NOISE,
    *OPTIM,
    *PARALLEL,
    *TESTING,
    *DATA,
    *WEIGHTS,
    *AFTER,
]
