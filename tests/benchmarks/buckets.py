"""What a bucket costs a run: steps during mirroring, and waits for batches of a corpus by URL.

    python tests/benchmarks/buckets.py [PAIRS]

Steps of a small decoder while a thread writes files of 32 MiB to the disk as a save does (hashed,
flushed), and while a thread puts the same files into a bucket, in turns. The bucket is a process
that reads what is sent and forgets it, so the other core is its own, as that of a machine elsewhere
is not. Then 50 steps of 100 ms beside the prefetcher, on a token file that was fetched by its URL.
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

import trainkit as tk
from trainkit import losses, models
from trainkit.batch import make_padding_batch
from trainkit.buckets import mount_files, open_store, put_file
from trainkit.data import PackedCorpus, make_step_batch, prefetch_batches
from trainkit.text.corpora import open_corpus, write_corpus
from trainkit.types import Cursor
from trainkit.weights.checkpoint.safe_files import write_durably

PAIRS = int(sys.argv[1]) if len(sys.argv) > 1 else 20
STEPS, SIZE, AIM = 10, 32 << 20, 1.01

SINK = r"""
import http.server, pathlib, sys
FOLDER = pathlib.Path(sys.argv[1])
UPLOAD = b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
DONE = b'<CompleteMultipartUploadResult><ETag>"1"</ETag></CompleteMultipartUploadResult>'
class Sink(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self, data=b"", start=0, end=None, size=None):
        part = data[start:end]
        self.send_response_only(200 if end is None else 206)
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Wed, 25 Nov 2026 00:00:00 GMT")
        self.send_header("Content-Length", str(len(part) if size is None else size))
        if end is not None:
            self.send_header("Content-Range", f"bytes {start}-{start + len(part) - 1}/{len(data)}")
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
        data = (FOLDER / self.path.rpartition("/")[2]).read_bytes()
        start, end = self.headers["Range"].removeprefix("bytes=").split("-")
        self.answer(data, int(start), int(end) + 1)
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


def seconds_beside(work, step):
    """Return the median seconds of some steps while a thread repeats `work`, and its MiB/s.

    Of the seconds both those of the clock and those of this thread on a processor.
    """
    stop, rounds = threading.Event(), [0]

    def repeat():
        while not stop.is_set():
            work()
            rounds[0] += 1

    thread = threading.Thread(target=repeat)
    thread.start()
    began, times = time.perf_counter(), []
    while len(times) < STEPS or not rounds[0]:
        begin, cpu = time.perf_counter(), time.thread_time()
        step()
        times.append((time.perf_counter() - begin, time.thread_time() - cpu))
    stop.set()
    thread.join()
    rate = rounds[0] * SIZE / (time.perf_counter() - began) / 2**20
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
            found.append(seconds_beside(work, step))
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
    tokens = [np.arange(1000) % 250 for _ in range(20_000)]
    write_corpus(folder / "web.tokens", tokens, vocab_size=256)
    size = (folder / "web.tokens").stat().st_size
    begin = time.perf_counter()
    mount_files(f"{store.url}/web.tokens")
    seconds = time.perf_counter() - begin
    corpus = open_corpus(f"{store.url}/web.tokens")
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
    print(f"a token file of {size / 2**20:.0f} MiB      {seconds:8.2f} s to fetch, once")
    verdict = "met" if worst < 0.1 else "MISSED"
    print(f"longest wait for a batch    {1e3 * worst:8.1f} ms     (below a step of 100: {verdict})")
    return worst < 0.1


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
        server = subprocess.Popen([sys.executable, "-c", SINK, name, str(port)])
        try:
            time.sleep(2)
            store = open_store("s3://bucket/folder")
            met = [measure_steps(folder, store), measure_prefetch(folder, store)]
        finally:
            server.kill()
            server.wait()
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
