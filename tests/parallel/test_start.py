"""What a run says that it is, before its first step."""

import attrs
import pytest
import torch
from torch import nn

from trainkit.mesh import solo_parallel
from trainkit.models import Decoder, count_parameters, make_decoder_config
from trainkit.packing import pack_bins
from trainkit.packing.report import format_overlong_warning
from trainkit.parallel import describe_run
from trainkit.parallel.parameters import mark_tied_copy_
from trainkit.parallel.stage_ranks import attach_axes
from trainkit.post.adapters import quantized
from trainkit.types import Precision

ROWS = pack_bins([6, 8, 3, 8, 8], 8)


def lines_of(*stages, ps=None, compute="fp32", rows_per_step=2):
    stages = attach_axes(stages, ps or solo_parallel())
    precision = Precision(compute=compute)
    return describe_run(stages, ROWS, rows_per_step=rows_per_step, precision=precision).splitlines()


def test_a_model_is_counted_with_what_is_frozen_and_ties_count_once():
    config = make_decoder_config("tiny", vocab_size=272, tied=True)
    with torch.device("meta"):
        tied, model = Decoder(config), Decoder(attrs.evolve(config, tied=False))
    parameters = count_parameters(config)
    assert lines_of(tied)[0].startswith(f"{parameters:,} parameters, all trained")
    total = f"{parameters + 272 * config.width:,} parameters"
    assert lines_of(model)[0] == f"{total}, all trained, in fp32 on meta, 1 rank"
    model.requires_grad_(False)
    model.norm.requires_grad_(True)
    first = lines_of(model, compute="bf16")[0]
    assert first.startswith(
        f"{total}, {config.width} of them trained, in bf16 (parameters fp32, sums fp32"
    )


def test_matrices_in_few_bits_are_told_in_bytes():
    model = nn.ModuleDict({"up": nn.Linear(128, 2), "down": nn.Linear(2, 3)})
    quantized("nf4", modules="up")(model, solo_parallel())
    text = lines_of(model)[0]  # of the matrix 2 rows of 64 bytes and of 2 + 8 for scales
    assert text.startswith("11 parameters, all trained, and 148 bytes of quantized matrices, in")


def test_a_tied_copy_of_a_pipeline_is_not_counted():
    first, last = nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)
    mark_tied_copy_(last.weight)
    assert lines_of(first, last)[0].startswith("12 parameters, all trained")


def test_the_rows_say_how_long_an_epoch_is():
    text = "5 rows of 8 tokens, 82.5 % full; 2 rows a step (16 tokens): 2.5 steps an epoch"
    assert lines_of(nn.Linear(1, 1))[1] == text


def test_the_layout_is_its_degrees_above_one():
    ps = solo_parallel()
    axes = {
        name: attrs.evolve(getattr(ps, name), share=attrs.evolve(ps.tp.share, count=count))
        for name, count in {"world": 8, "dp_shard": 4, "tp": 2}.items()
    }
    text = lines_of(nn.Linear(1, 1), ps=attrs.evolve(ps, **axes))[0]
    assert text.endswith("on cpu, 8 ranks: dp_shard 4 x tp 2")


@pytest.mark.parametrize(
    ("counts", "share"),
    [
        ((0, 100, 300), "33 %"),
        ((2, 0, 1000), "0.2 %"),
        ((1, 2, 3), "100 %"),
        ((99, 0, 1000), "10 %"),
    ],
)
def test_what_is_cut_or_dropped_is_a_warning_with_its_share(counts, share):
    cut, dropped, total = counts
    text = format_overlong_warning(
        total, capacity=2048, truncated=cut, dropped=dropped, what="chats"
    )
    assert text.startswith(f"warning: {cut + dropped} of {total:,} chats are longer than 2,048 tok")
    assert text.endswith(f": {share} ({cut} cut, {dropped} dropped)")
    assert format_overlong_warning(total, capacity=2048) == ""
