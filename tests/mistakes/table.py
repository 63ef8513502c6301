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
        "a full bin stays open",
        "            tree[node] = tree[node] - taken * length if room[bin_] > 0 else 0",
        "            tree[node] = tree[node] - taken * length",
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
        "    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]",
        "    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]\n    begins[1:, 0] = ids[1:, 0] != ids[:-1, -1]",
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
        "permutation.py",
        "an epoch ends one row early",
        "        index = np.arange(first, min(first + end - place, num_rows))",
        "        index = np.arange(first, min(first + end - place, num_rows - 1))",
        "tests/test_sampling.py",
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
        "    total, *_ = _of_logits(logits, batch)\n    return total, {",
        "    total, *_ = _of_logits(logits, batch)\n"
        '    total = total / (batch["labels"] >= 0).sum().clamp(min=1)\n    return total, {',
        "tests/families/test_losses.py",
    ),
    (
        "terms.py",
        "the second loss of a sum loses its weight",
        "        first, *rest = (weight * total for (total, _), weight in parts)",
        "        first, *rest = (weight ** (i == 0) * t for i, ((t, _), weight) in enumerate(parts))",
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
        "terms.py",
        "losses of logits count labels that are not trained",
        "    losses = losses.masked_fill(flat == IGNORED_LABEL, 0)",
        "    losses = losses.masked_fill(flat < -IGNORED_LABEL * IGNORED_LABEL, 0)",
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
        "tests/losses",
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
        "    out = (rising.softmax(-1).cumsum(-1) < 1 - p + 1e-2) & (torch.as_tensor(p) < 1)",
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
        "    weight_a, weight_b = (torch.full_like(base, 0.5).unsqueeze(-1) for _ in (lse_a, lse_b))",
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
        "    weights = scores.gather(-1, indices)\n    if renormalise:\n        weights = weights / (",
        "    weights = (scores if bias is None else scores + bias).gather(-1, indices)\n"
        "    if renormalise:\n        weights = weights / (",
        "tests/models/test_experts.py tests/models/test_routers.py",
    ),
    (
        "routers.py",
        "groups are chosen by their best expert alone",
        "    best = parted.topk(min(2, parted.shape[-1]), -1).values.sum(-1)",
        "    best = parted.amax(-1)",
        "tests/models/test_experts.py tests/models/test_routers.py",
    ),
    (
        "routers.py",
        "an expert takes one token more than it has room for",
        "    is_kept[ordered.indices] = place < capacity",
        "    is_kept[ordered.indices] = place <= capacity",
        "tests/models/test_experts.py tests/models/test_routers.py",
    ),
    (
        "routers.py",
        "jitter moves tokens up alone",
        "(bits.double() * 2.0**-52 - 1)",
        "(bits.double() * 2.0**-53)",
        "tests/models/test_experts.py tests/models/test_routers.py",
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
