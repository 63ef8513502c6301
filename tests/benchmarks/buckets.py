"""What a bucket costs a run: steps during mirroring, and waits for batches of a corpus by URL.

    python tests/benchmarks/buckets.py [PAIRS | compare]

Steps of a small decoder while a thread writes files of 32 MiB to the disk as a save does (hashed,
flushed), and while a thread puts the same files into a bucket, in turns. The bucket is a process
that reads what is sent and forgets it; first at a low priority, as a machine elsewhere takes none
of this one's cores, then at the usual one. Then 50 steps of 100 ms beside the prefetcher, on rows
in a shuffled order of a token file that is not in the cache; the bucket waits 30 ms before it
answers a read.

With `compare` instead: obstore and s3fs put and get 256 MiB at moto's server, in turns (needs s3fs
and moto's server).
"""

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import attrs
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import bucket_server

import trainkit as tk
from trainkit import losses, models
from trainkit.batch import make_padding_batch
from trainkit.buckets import get_file, mount_files, open_store, put_file
from trainkit.buckets.store import lower_priority
from trainkit.data import PackedCorpus, make_step_batch, prefetch_batches
from trainkit.text.corpora import open_tokens, write_corpus
from trainkit.types import Cursor
from trainkit.weights.checkpoint.safe_files import write_durably

COMPARES = sys.argv[1:] == ["compare"]
PAIRS = int(sys.argv[1]) if len(sys.argv) > 1 and not COMPARES else 20
STEPS, SIZE, AIM = 10, 32 << 20, 1.01

SINK = r"""
import http.server, pathlib, sys, time
FOLDER = pathlib.Path(sys.argv[1])
UPLOAD = b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
DONE = b'<CompleteMultipartUploadResult><ETag>"1"</ETag></CompleteMultipartUploadResult>'
class Sink(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self, part=b"", start=0, total=None, size=None):
        self.send_response_only(200 if total is None else 206)
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Wed, 25 Nov 2026 00:00:00 GMT")
        self.send_header("Content-Length", str(len(part) if size is None else size))
        if total is not None:
            self.send_header("Content-Range", f"bytes {start}-{start + len(part) - 1}/{total}")
        self.end_headers()
        self.wfile.write(part)
    def do_PUT(self):
        left = int(self.headers["Content-Length"])
        while left:
            left -= len(self.rfile.read(min(left, 1 << 20)))
        self.answer()
    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer(DONE if "uploadId" in self.path else UPLOAD)
    def do_HEAD(self):
        self.answer(size=(FOLDER / self.path.rpartition("/")[2]).stat().st_size)
    def do_GET(self):
        time.sleep(0.03)
        start, end = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        with (FOLDER / self.path.rpartition("/")[2]).open("rb") as file:
            total = file.seek(0, 2)
            file.seek(start)
            self.answer(file.read(end + 1 - start), start, total)
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Sink)
server.serve_forever()
"""


def make_step():
    config = models.make_decoder_config("tiny", vocab_size=256, width=128, layers=2)
    model = models.Decoder(config, head="hidden")
    params = tk.get_parameters([model])
    optimizer = torch.optim.AdamW(params, lr=1e-3, fused=True)
    batch = make_padding_batch(2, 256)
    batch = attrs.evolve(batch, labels=batch.input_ids)

    def step():
        tokens = tk.count_valid_tokens([batch])
        tk.forward_backward(model, [batch], losses.next_token_linear, denominator=tokens)
        tk.clip_and_step(params, optimizer, lr=1e-3, max_norm=1.0)

    return step


def seconds_beside(work, step, begin=bool):
    """Return the median seconds of some steps while a thread repeats `work`, and its MiB/s.

    Of the seconds both those of the clock and those of this thread on a processor.
    """
    stop, rounds = threading.Event(), [0]

    def repeat():
        begin()
        while not stop.is_set():
            work()
            rounds[0] += 1

    thread = threading.Thread(target=repeat)
    thread.start()
    start, times = time.perf_counter(), []
    while len(times) < STEPS or not rounds[0]:
        before, cpu = time.perf_counter(), time.thread_time()
        step()
        times.append((time.perf_counter() - before, time.thread_time() - cpu))
    stop.set()
    thread.join()
    rate = rounds[0] * SIZE / (time.perf_counter() - start) / 2**20
    wall, on_core = (statistics.median(column) for column in zip(*times, strict=True))
    return wall, rate, on_core


def measure_steps(folder, store):
    step, data = make_step(), os.urandom(SIZE)
    source, target = folder / "source", folder / "target"
    source.write_bytes(data)

    def save():
        target.unlink(missing_ok=True)
        write_durably(target, [data])

    step()
    saves, mirrors = [], []
    for pair in range(PAIRS):
        order = [(save, saves), (partial(put_file, store, "file", source), mirrors)]
        for work, found in order if pair % 2 else order[::-1]:
            # As the threads of a save and of the mirror begin.
            begin = lower_priority if found is mirrors else bool
            found.append(seconds_beside(work, step, begin))
    ratios = [mirror[0] / save[0] for mirror, save in zip(mirrors, saves, strict=True)]
    ratio = statistics.median(ratios)
    low, _, high = statistics.quantiles(ratios, n=4)
    alone = []
    for _ in range(3 * STEPS):
        begin = time.perf_counter()
        step()
        alone.append(time.perf_counter() - begin)
    print(f"a step alone                {1e3 * statistics.median(alone):8.1f} ms")
    for name, found in (("a local save", saves), ("mirroring", mirrors)):
        ms, rate, cpu = (statistics.median(column) for column in zip(*found, strict=True))
        print(
            f"a step beside {name:12s}  {1e3 * ms:8.1f} ms, {1e3 * cpu:.1f} of them on a core  "
            f"({rate:.0f} MiB/s)"
        )
    verdict = "met" if ratio <= AIM else "MISSED"
    print(
        f"mirroring over a local save {ratio:8.3f}      (quartiles {low:.3f} to {high:.3f}, "
        f"{PAIRS} pairs; at most {AIM}: {verdict})"
    )
    return ratio <= AIM


def measure_prefetch(folder, store):
    tokens = [np.arange(1000) % 250 for _ in range(130_000)]
    write_corpus(folder / "web.tokens", tokens, vocab_size=256)
    size = (folder / "web.tokens").stat().st_size
    # Without the hashes that `open_corpus` compares, which would fill the cache with this file.
    corpus = open_tokens(mount_files(f"{store.url}/web.tokens"), check="none")
    cached = sum(x.stat().st_size for x in (folder / "cache").glob("blocks/*/*"))
    rows = PackedCorpus(corpus, tk.pack_bins(corpus.lengths, capacity=1024))
    order = np.random.default_rng(0).permutation(len(rows))
    make = partial(
        make_step_batch, rows, lambda batch: order[8 * batch : 8 * batch + 8], rows_per_microbatch=4
    )
    waits, cursor = [], Cursor()
    with prefetch_batches(make, cursor, device=torch.device("cpu")) as next_batch:
        for _ in range(50):
            begin = time.perf_counter()
            cursor = next_batch(cursor).cursor
            waits.append(time.perf_counter() - begin)
            time.sleep(0.1)
    worst = max(waits[1:])
    fetched = sum(x.stat().st_size for x in (folder / "cache").glob("blocks/*/*")) - cached
    print(
        f"a token file of {size / 2**20:.0f} MiB, of which {cached / 2**20:.0f} were cached before "
        f"and {fetched / 2**20:.0f} were fetched by 50 steps of 8 rows"
    )
    print(f"wait for the first batch    {1e3 * waits[0]:8.1f} ms")
    verdict = "met" if worst < 0.1 else "MISSED"
    print(f"longest wait for a batch    {1e3 * worst:8.1f} ms     (below a step of 100: {verdict})")
    return worst < 0.1


def compare_clients(folder):
    """Put and get a file with obstore and with s3fs, in turns, at moto's server."""
    import s3fs  # of no extra

    source = folder / "source"
    source.write_bytes(os.urandom(256 << 20))
    with bucket_server.serve() as endpoint:
        bucket_server.make_client(endpoint).create_bucket(Bucket="bucket")
        os.environ["AWS_ENDPOINT_URL"] = endpoint
        store = open_store("s3://bucket/folder")
        remote = s3fs.S3FileSystem(endpoint_url=endpoint)
        for _ in range(3):
            for name, put, get in (
                ("obstore", partial(put_file, store, "a", source), partial(get_file, store, "a")),
                (
                    "s3fs",
                    partial(remote.put_file, str(source), "bucket/b"),
                    lambda path: remote.get_file("bucket/b", str(path)),
                ),
            ):
                target = folder / "target"
                target.unlink(missing_ok=True)
                for verb, act in (("put", put), ("get", partial(get, target))):
                    begin, cpu = time.perf_counter(), time.process_time()
                    act()
                    seconds = time.perf_counter() - begin
                    used = time.process_time() - cpu
                    print(f"{name:8s} {verb} {256 / seconds:6.0f} MiB/s, {used:.2f} s of a core")
    for module in ("obstore", "s3fs"):
        code = f"import time; t = time.time(); import {module}; print(time.time() - t)"
        took = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        print(f"import {module} {float(took.stdout):.2f} s")


def main():
    torch.set_num_threads(1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ |= {
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "TRAINKIT_CACHE": str(folder / "cache"),
        }
        if COMPARES:
            compare_clients(folder)
            return 0
        met, sink = [], [sys.executable, "-c", SINK, name, str(port)]
        for priority, nice in (("low", "19"), ("usual", "0")):
            server = subprocess.Popen(["nice", "-n", nice, *sink])
            try:
                time.sleep(2)
                store = open_store("s3://bucket/folder")
                print(f"the bucket's process at a {priority} priority")
                met.append(measure_steps(folder, store))
                if priority == "usual":
                    met.append(measure_prefetch(folder, store))
            finally:
                server.kill()
                server.wait()
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
