"""Convert foreign checkpoints to folders of weights that trainkit can verify."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainkit.weights.checkpoint.export import SHARD_BYTES, write_weights
from trainkit.weights.checkpoint.safe_files import refusal
from trainkit.weights.checkpoint.tensor_files import check_boxes, check_crc, is_plain_tensor_name
from trainkit.weights.convert.foreign import read_foreign_tensors


def convert_weights(
    source: Path | str,
    folder: Path | str,
    *,
    prefix: str = "",
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Convert a foreign checkpoint into a folder that `open_weights` reads.

    It may be a directory of torch.distributed.checkpoint, a file of torch.save, a safetensors file
    or a folder of those. Pickles are read in a separate process with bounded memory, by torch's
    loader with `weights_only=True`; objects that are not tensors are skipped and listed. A file's
    own checksums (the CRC-32 of each zip member) are verified, which torch does not do.

    Args:
        source: The foreign checkpoint.
        folder: The new folder.
        prefix: Only convert tensors whose names begin with it, for instance "model.", and remove it
            from their names.
        dtype: See `export_checkpoint`.
        shard_bytes: See `export_checkpoint`.
        overwrite: See `export_checkpoint`.

    Returns:
        As `export_checkpoint`, and "kind" and "skipped".

    Raises:
        CheckpointError: The source is damaged or malicious; nothing is written.
        ConfigError: The folder exists.
        DiskError: It cannot be written.

    Effects:
        Writes a folder; starts a process that reads pickles, and executes nothing in them.

    Examples:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as home:
        ...     torch.save({"model": {"w": torch.ones(2)}, "epoch": 3}, f"{home}/a.pt")
        ...     report = convert_weights(f"{home}/a.pt", f"{home}/weights", prefix="model.")
        >>> report["files"], report["skipped"]
        (['model.safetensors'], ['epoch'])
    """
    source = Path(source)
    found = read_foreign_tensors(source)
    chosen = {
        name.removeprefix(prefix): stored
        for name, stored in found.tensors.items()
        if name.startswith(prefix)
    }
    if not chosen:
        some = ", ".join(sorted(found.tensors)[:5])
        raise refusal(source, f"holds no tensor whose name begins with {prefix!r}; some are {some}")
    for name, stored in chosen.items():
        if not is_plain_tensor_name(name):
            raise refusal(source, f"holds a tensor of the odd name {name[:100]!r}")
        # Here and not in the process that read the pickles: what that reports is not trusted.
        check_boxes(name, stored, source)
        for extent in stored.extents:
            check_crc(extent)
    # Box by box from where they are in the source: no tensor is in memory as a whole.
    report = write_weights(
        chosen,
        folder,
        dtype=dtype,
        shard_bytes=shard_bytes,
        overwrite=overwrite,
        origin={"source": source.name, "kind": found.kind},
    )
    # Tensors without the prefix are listed too: nothing is left out silently.
    unmatched = [name for name in found.tensors if not name.startswith(prefix)]
    return report | {"kind": found.kind, "skipped": sorted([*found.skipped, *unmatched])}
