"""A recipe in a process of its own, with its run and its corpus in a bucket."""

import json
import shutil

import pytest
from bucket_server import KEY, SECRET
from recipe_runs import SMALL, run

from trainkit.buckets import cache_folder, get_bytes, list_files, open_store, put_file
from trainkit.weights.checkpoint.manifest import list_checkpoints, verify_checkpoint

FLAGS = f"{SMALL} --save-every 2 --keep 2 --eval-every 0".split()


def read_tensors(folder):
    path = list_checkpoints(folder / "checkpoints")[0]
    assert verify_checkpoint(path) == []
    return path.name, {x.name: x.read_bytes() for x in path.glob("*.safetensors")}


def read_losses(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines]


def test_a_recipe_goes_on_from_the_bucket_bit_for_bit(bucket, tmp_path):
    _, _, url = bucket
    pa = pytest.importorskip("pyarrow")
    texts = [f"{n} and {n + 1} are {2 * n + 1}. " * 3 for n in range(300)]
    pytest.importorskip("pyarrow.parquet").write_table(
        pa.table({"text": texts}), tmp_path / "web.parquet", row_group_size=50
    )
    root = url.rpartition("/")[0]
    put_file(open_store(f"{root}/data"), "web.parquet", tmp_path / "web.parquet")
    local = tmp_path / "local"
    run("pretrain", *FLAGS, "--steps", 8, "--out", local, "--data", tmp_path / "web.parquet")
    remote = ["--out", url, "--data", f"{root}/data/web.parquet"]
    store = open_store(url)
    printed = run("pretrain", *FLAGS, "--steps", 4, *remote, cwd=tmp_path)
    folder = cache_folder("runs", url)
    assert len(read_losses(folder)) == 4
    shutil.rmtree(folder.parents[3])  # all of the cache
    printed += run("pretrain", *FLAGS, "--steps", 8, *remote, cwd=tmp_path)
    assert read_losses(folder) == read_losses(local)
    assert read_tensors(folder) == read_tensors(local)
    # Nothing of the credentials is anywhere: in what was printed, on the disk, in the bucket.
    texts = [printed.encode(), *(x.read_bytes() for x in tmp_path.rglob("*") if x.is_file())]
    texts += [get_bytes(store, key) for key in list_files(store)]
    assert len(texts) > 20
    assert not [x for x in texts if KEY.encode() in x or SECRET.encode() in x]
    assert not [*tmp_path.glob("s3:*")]
