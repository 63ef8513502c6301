"""Run directories as training leaves them, without training: for tests and pictures of the page.

python tests/report_runs.py FOLDER writes one of each kind.
"""

import math
import sys
from pathlib import Path

import numpy as np
import orjson

START = 1_790_000_000.0
CORPORA = {"web": 0.62, "code": 0.21, "books": 0.11, "maths": 0.06}
SAMPLES = (
    " the the of first, in energy and a of law of the system is the heat",
    " that the energy of a system is a heat of the system, and the law is the energy.",
    " that energy cannot be created; it can be changed from one form of heat to another.",
    (
        " that energy is neither created nor destroyed, it only changes its form: the change\n"
        "in the internal energy of a closed system equals the heat added minus the work done."
    ),
)
HOSTILE = "</script><img src=x onerror=alert(1)><script>alert(2)</script>"


def write_lines(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))


def make_steps(count, *, seed=0, lr=3e-4, rate=1.0, corpora=CORPORA, slow_after=None, begin=START):
    """Return lines of metrics of a run that goes well."""
    rng = np.random.default_rng(seed)
    steps = np.arange(1, count + 1)
    share = steps / count
    loss = (
        1.92
        + 8.9 * (1 + steps / (0.004 * count + 6)) ** -0.62
        - 0.16 * np.clip((share - 0.8) / 0.2, 0, 1)
    )
    noise = np.convolve(rng.normal(size=count + 8), np.ones(9) / 3, "valid")
    loss += 0.018 * noise + 0.03 * rng.normal(size=count)
    warm = np.minimum(1, steps / (0.02 * count + 1))
    decay = np.where(share > 0.8, np.maximum(0, 1 - (share - 0.8) / 0.2), 1)
    norm = (0.35 + 2.4 * np.exp(-share * 40)) * np.exp(0.16 * rng.normal(size=count))
    seconds = 0.412 / rate * np.exp(0.012 * rng.normal(size=count))
    wait = 0.004 * np.exp(0.5 * rng.normal(size=count))
    if slow_after is not None:
        wait[slow_after:] += 0.21 + 0.05 * np.abs(rng.normal(size=count - slow_after))
    seconds += wait
    parts = {"wait": 0.034, "forward": 0.289, "backward": 0.549, "reduce": 0.078, "step": 0.046}
    parts["log"] = 0.004
    draws = rng.dirichlet([400 * x for x in corpora.values()], size=count) if corpora else None
    tokens = 524_288
    time = begin + np.cumsum(seconds)
    lines = []
    for i in range(count):
        padding = 0.013 + 0.002 * rng.random()
        valid = int(tokens * (1 - padding))
        line = {
            "step": int(steps[i]),
            "time": round(float(time[i]), 3),
            "loss": float(loss[i]),
            "loss_hex": float(loss[i]).hex(),
            "perplexity": math.exp(min(20, loss[i])),
            "grad_norm": float(norm[i]),
            "skipped": 0,
            "lr": float(lr * warm[i] * (0.05 + 0.95 * decay[i])),
            "tokens": valid,
            "tokens_processed": tokens,
            "tokens_total": valid * int(steps[i]),
            "batch_hash": f"{i * 2654435761 % 2**64:016x}",
            "seconds": float(seconds[i]),
            "tokens_per_second": tokens / float(seconds[i]),
            "documents_per_second": 610 / float(seconds[i]),
            "padding": padding,
            "mfu": 0.431 * 0.412 / float(seconds[i]) * rate**-0.4,
            "hfu": 0.522 * 0.412 / float(seconds[i]) * rate**-0.4,
            "memory": int(61.2 * 2**30 + 3e8 * math.sin(i / 40)),
            "memory_reserved": int(70.4 * 2**30),
            "memory_peak": int(66.1 * 2**30 + 2e8 * min(1, i / 900)),
            "memory_rank": 12,
            "seconds/data": float(wait[i]),
        }
        for name, part in parts.items():
            line[f"seconds/{name}"] = float((seconds[i] - wait[i]) * part)
        if draws is not None:
            for name, x in zip(corpora, draws[i], strict=True):
                line[f"tokens/{name}"] = int(valid * x)
                line[f"rows/{name}"] = int(128 * x)
        lines.append(line)
    return lines


def make_events(lines, *, last, ranks=16, every=1000, save=500, end=True):
    """Return the events of a run that goes well: start, evaluations, saves, samples, end."""
    begin = lines[0]["time"] - 95.0
    software = {
        "python": "3.12.4",
        "torch": "2.13.0+cu130",
        "trainkit": "0.1.0.dev0",
        "trainkit source": "39b3fe10c791f85b",
    }
    events = [
        {
            "time": begin,
            "event": "start",
            "step": 0,
            "repeated": 0,
            "ranks": ranks,
            "last": last,
            "run": "cfe556",
        },
        make_host(begin + 1, ranks),
        {"time": begin + 2, "event": "resume", "step": 0, "messages": [], "software": software},
    ]
    for name, share in CORPORA.items():
        events.append(
            {
                "time": begin + 3,
                "event": "packing",
                "step": 0,
                "corpus": name,
                "rows": int(4e6 * share),
                "tokens": int(1.6e10 * share),
                "documents": int(2.1e7 * share),
                "efficiency": 0.985 + share / 100,
                "split_documents": int(7e5 * share),
            }
        )
    rng = np.random.default_rng(7)
    for line in lines:
        step, time = line["step"], line["time"]
        if step % every == 0:
            held_out = (line["loss"] or 3.0) + 0.045 + 0.006 * rng.normal()
            events.append(
                {
                    "time": time + 0.1,
                    "event": "evaluation",
                    "step": step,
                    "eval/loss": held_out,
                    "eval/tokens": 2_097_152,
                    "eval/accuracy": 0.78 - 0.11 * held_out,
                }
            )
        if step % (5 * every) == 0:
            events.append(
                {
                    "time": time + 0.2,
                    "event": "sample",
                    "step": step,
                    "prompt": "The first law of thermodynamics says",
                    "text": SAMPLES[min(len(SAMPLES) - 1, int(4 * step / lines[-1]["step"]))],
                }
            )
        if step % save == 0:
            events.append(
                {
                    "time": time + 0.3,
                    "event": "save",
                    "step": step,
                    "path": f"/runs/mine/checkpoints/step_{step:08d}",
                    "seconds": 11.8,
                    "blocked": 0.4,
                    "error": None,
                }
            )
    if end:
        events.append(
            {
                "time": lines[-1]["time"] + 1,
                "event": "end",
                "step": lines[-1]["step"],
                "failure": None,
            }
        )
    return events


def make_host(time, ranks):
    """Return the event that lists the machines."""
    hosts = [
        {
            "host": f"node-{n}",
            "ranks": list(range(8 * n, 8 * n + 8)),
            "device": "NVIDIA H100 80GB HBM3",
            "driver": "570.86",
            "torch": "2.13.0+cu130",
        }
        for n in range(max(1, ranks // 8))
    ]
    layout = {"dp_shard": ranks // 4, "tp": 2, "pp": 2}
    return {"time": time, "event": "host", "hosts": hosts, "layout": layout}


def make_profile(time, step):
    """Return the event of a profile of four steps."""
    names = {
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT": 0.312,
        "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NTN": 0.227,
        "flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel": 0.118,
        "flash::flash_fwd_kernel": 0.061,
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL": 0.049,
        "ncclDevKernel_AllGather_RING_LL": 0.044,
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt": 0.036,
        "multi_tensor_apply_kernel<FusedAdamW>": 0.031,
    }
    operations = [
        {"name": name, "calls": 2048 - 224 * n, "seconds": 1.66 * share}
        for n, (name, share) in enumerate(names.items())
    ]
    return {
        "time": time,
        "event": "profile",
        "step": step,
        "first": step - 3,
        "path": "profiles/step_12001",
        "seconds": 1.66,
        "idle": 0.074,
        "operations": operations,
    }


def make_layers(lines, *, layers=12, every=50):
    """Return statistics by layer: norms that fall with depth, and one layer that grows."""
    rng = np.random.default_rng(3)
    names = ["embedding.weight"]
    for layer in range(layers):
        names += [
            f"layers.{layer}.{part}.weight"
            for part in ("attention.wq", "attention.wo", "mlp.up", "mlp.down")
        ]
    names.append("head.weight")
    depth = np.linspace(0, 1, len(names))
    found = []
    for line in lines[every - 1 :: every]:
        share = line["step"] / lines[-1]["step"]
        base = 3e-4 * np.exp(-1.4 * depth + 0.25 * rng.normal(size=len(names)) - 1.2 * share)
        base[4 * 8 + 1 : 4 * 8 + 5] *= 1 + 9 * max(0.0, share - 0.45)
        for kind, size in (("gradient", 1.0), ("weight", 90.0), ("update", 2.0)):
            rms = base * size if kind != "weight" else 0.02 + 0.012 * share * (1 + depth)
            found.append(
                {
                    "step": line["step"],
                    "time": line["time"],
                    "kind": kind,
                    "names": names,
                    "rms": rms.tolist(),
                    "largest": (rms * 11).tolist(),
                    "zeros": (0.002 + 0.01 * depth * share).tolist(),
                    "nonfinite": [0] * len(names),
                }
            )
        rms = np.linspace(0.6, 1.8 + share, layers)
        found.append(
            {
                "step": line["step"],
                "time": line["time"],
                "kind": "activation",
                "names": [f"layers.{layer}" for layer in range(layers)],
                "rms": rms.tolist(),
                "largest": (rms * 14).tolist(),
                "zeros": [0] * layers,
                "nonfinite": [0] * layers,
            }
        )
    return found


def hold_lock(folder):
    """Let a run look as if a process of another host were at it."""
    (folder / "lock").write_text('{"host": "elsewhere", "pid": 1}')


def write_run(folder, lines, events, *, config=None, layers=(), final=False, tail=b""):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "metrics.jsonl", lines)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(tail)
    write_lines(folder / "events.jsonl", events)
    if layers:
        write_lines(folder / "layers.jsonl", layers)
    values = {
        "size": "llama-3.1-8b",
        "lr": 3e-4,
        "warmup": 400,
        "optimizer": "adamw",
        "weight_decay": 0.1,
        "rows": 128,
        "row_length": 4096,
        "max_norm": 1.0,
        "seed": 0,
        "compute": "bf16",
        "recompute": "selective",
        "pp": 2,
        "dp_shard": -1,
        "tp": 2,
        "ring": 1,
        "ulysses": 1,
        "dp_replicate": 1,
        "ep": 1,
        "schedule": "1f1b",
        "fold_sp": "all",
        "eval_every": 1000,
        "save_every": 500,
        "data": ["web", "code", "books", "maths"],
    } | (config or {})
    (folder / "config.toml").write_text(
        "".join(f"{key} = {orjson.dumps(x).decode()}\n" for key, x in values.items())
    )
    (folder / "run.json").write_text('{"run": "cfe556", "parent": null}')
    if not any(event["event"] == "end" for event in events):
        hold_lock(folder)
    if final:
        (folder / "final.json").write_bytes(
            orjson.dumps({"step": lines[-1]["step"], "state_hash": "b1833bde"})
        )
    return folder


def known(folder):
    """A run with round figures, which goes on: 150 of 200 steps, a restart, two evaluations."""
    lines = []
    for step in range(1, 151):
        seconds = 1.0 if step < 100 else 0.5
        lines.append(
            {
                "step": step,
                "time": START + step,
                "loss": 4.0 - step / 75,
                "seconds": seconds,
                "tokens_total": 1000 * step,
                "tokens_per_second": 1000 / seconds,
                "mfu": 0.2 / seconds,
                "hfu": 0.25 / seconds,
                # The largest is not that of the last line, nor on its rank.
                "memory_peak": (3 if step == 80 else 1) * 2**30,
                "memory_rank": 2 if step == 80 else 1,
            }
        )
    start = {"event": "start", "last": 200}
    events = [
        {**start, "time": START, "step": 0, "ranks": 8},
        {"event": "evaluation", "time": START + 101, "step": 100, "eval/loss": 2.25},
        {"event": "save", "time": START + 105, "step": 100, "blocked": 1.0},
        {**start, "time": START + 1000, "step": 100, "ranks": 4, "repeated": 10},
        {"event": "evaluation", "time": START + 1144, "step": 150, "eval/loss": 2.5},
    ]
    return write_run(folder, lines, events)


def healthy(
    folder,
    count=20_000,
    *,
    seed=0,
    lr=3e-4,
    rate=1.0,
    optimizer="adamw",
    shift=0.0,
    experts=True,
    until=None,
):
    """A run that has seen two restarts, a roll-back and a few skipped steps, and finished.

    With `until` it goes on, and has reached that step.
    """
    lines = make_steps(count, seed=seed, lr=lr, rate=rate)
    for line in lines:
        line["loss"] += shift * min(1, line["step"] / (0.1 * count))
        if experts and line["step"] % 20 == 0:
            rng = np.random.default_rng(line["step"] + seed)
            tilt = np.exp(-3 * line["step"] / count) * np.linspace(-0.9, 1.1, 8)
            line["load"] = [
                (1000 * np.exp(tilt * (1 if layer % 2 else -1) + 0.08 * rng.normal(size=8)))
                .round()
                .tolist()
                for layer in range(4)
            ]
    events = make_events(
        lines, last=count, ranks=8, every=max(1, count // 20), save=max(1, count // 40)
    )
    for skipped, (at, jump) in enumerate(
        ((0.18, 0.9), (0.37, 2.6), (0.372, 1.1), (0.66, 0.7)), start=1
    ):
        line = lines[int(at * count)]
        line["loss"] += jump
        line["grad_norm"] *= 14 * jump
        events.append(
            {
                "time": line["time"] + 0.01,
                "event": "skip",
                "step": line["step"],
                "reason": f"the gradient norm {line['grad_norm']:.1f} is 21 sigmas above its mean",
                "guilty": [],
            }
        )
        for later in lines[line["step"] - 1 :]:
            later["skipped"] = skipped
    down = lines[int(0.3 * count)]
    for line in lines[int(0.3 * count) :]:
        line["time"] += 1900
    events = [
        e if e["time"] < down["time"] - 1900 else {**e, "time": e["time"] + 1900} for e in events
    ]
    back = down["time"] - 140
    events.append({"time": back - 1700, "event": "stop", "step": down["step"], "why": "SIGTERM"})
    events.append(
        {
            "time": back,
            "event": "start",
            "step": down["step"] - 1,
            "repeated": 0,
            "ranks": 8,
            "last": count,
        }
    )
    moved = lines[int(0.55 * count)]
    events.append(
        {
            "time": moved["time"] - 60,
            "event": "start",
            "step": moved["step"] - 1,
            "repeated": 38,
            "ranks": 16,
            "last": count,
        }
    )
    events.append(make_host(moved["time"] - 59, 16))
    profiled = lines[int(0.6 * count)]
    events.append(make_profile(profiled["time"], profiled["step"]))
    bad = lines[int(0.74 * count)]
    events.append(
        {
            "time": bad["time"],
            "event": "rolled back",
            "step": bad["step"],
            "reason": "loss 7.81 is above 10 sigmas for 3 steps",
        }
    )
    events.append(
        {
            "time": bad["time"] + 300,
            "event": "control",
            "step": bad["step"] + 300,
            "request": "save",
            "argument": None,
            "by": "ada",
            "asked": bad["time"] + 298.5,
            "done": bad["time"] + 300,
            "ranks": 16,
            "verdict": "done",
            "text": "a checkpoint is saved after this step",
        }
    )
    events.append(
        {
            "time": bad["time"] + 900,
            "event": "straggler",
            "step": bad["step"] + 700,
            "rank": 7,
            "busy": 0.98,
            "others": 0.31,
            "what": "watch: rank 7 (process 21130 on node7) is slower than the others",
        }
    )
    events.sort(key=lambda event: event["time"])
    if until is not None:
        lines = lines[:until]
        events = [event for event in events if event["time"] <= lines[-1]["time"]]
    return write_run(
        folder,
        lines,
        events,
        config={"lr": lr, "optimizer": optimizer, "seed": seed},
        layers=make_layers(lines, every=max(1, count // 200)),
        final=until is None,
    )


def slow(folder, count=3000):
    """A run whose data waits from the middle on, and which still goes on."""
    lines = make_steps(count, slow_after=count // 2, seed=4)
    return write_run(folder, lines, make_events(lines, last=4 * count, end=False))


def diverging(folder, count=1500):
    """A run whose loss climbs and ends as NaN."""
    lines = make_steps(count, seed=5, lr=3e-3)
    for line in lines[count // 2 :]:
        far = (line["step"] - count // 2) / count
        line["loss"] += 30 * far**2
        line["grad_norm"] *= math.exp(9 * far)
    for line in lines[-4:]:
        line |= {"loss": None, "loss_hex": "nan", "grad_norm": None, "grad_norm_hex": "nan"}
    events = make_events(lines, last=4 * count, every=250, end=False)
    end = lines[-1]
    events += [
        {
            "time": end["time"],
            "event": "stop",
            "step": end["step"],
            "reason": "the loss is nan in 4 steps",
            "guilty": ["rank 3: layers.7.mlp.down"],
        },
        {"time": end["time"] + 1, "event": "end", "step": end["step"], "failure": "NumericsError"},
    ]
    return write_run(folder, lines, events, config={"lr": 3e-3})


def repeated(folder, count=200):
    """A file in which a restart has written steps again, as other programs leave it."""
    first, again = make_steps(count, seed=1), make_steps(count + 60, seed=2, begin=START + 5000)
    return write_run(
        folder, [*first, *again[count // 2 :]], make_events(first, last=500, every=50, end=False)
    )


def damaged(folder):
    """Lines that are cut, zeroed, no JSON, no objects, without steps, of other types."""
    lines = make_steps(30)
    odd = [{"event": 7}, {"event": []}, {"event": "save", "time": "now"}]
    odd.append({"event": "start", "time": 1.0, "step": "x", "ranks": "many"})
    events = [*make_events(lines, last=30, every=10, end=False), *odd]
    lines[3] |= {"step": 4.0}
    lines[4] |= {"step": "5", "loss": "2.5", "lr": [1]}
    folder = write_run(folder, lines, events)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(
            b'{"loss": 1.0, "epoch": 0.5}\n[1, 2]\nTraceback (most recent call last):\n'
            + b"\0" * 40
            + b'\n{"step": 31, "lo'
        )
    (folder / "config.toml").write_text("lr = = 3")
    write_lines(
        folder / "layers.jsonl",
        [{"step": 1}, {"kind": "weight", "step": 2, "names": ["a", "b"], "rms": [1.0]}],
    )
    return folder


def hostile(folder):
    """Names and texts that would be markup."""
    lines = make_steps(40, corpora={HOSTILE: 0.5, "<b>bold</b>": 0.5})
    for line in lines:
        line["<i>metric</i>"] = 1.0 / line["step"]
    events = make_events(lines, last=40, every=10, save=10)
    events += [
        {
            "time": START + 20,
            "event": "sample",
            "step": 30,
            "prompt": HOSTILE,
            "text": "<!-- <script>\u2028\u2029 & &lt;",
        },
        {"time": START + 20, "event": HOSTILE, "step": 31, "what": HOSTILE},
        {"time": START + 20, "event": "end", "step": 40, "failure": HOSTILE},
    ]
    return write_run(
        folder, lines, events, config={"size": HOSTILE, "optimizer": "'\"><svg/onload=alert(3)>"}
    )


KINDS = {
    "healthy": healthy,
    "slow": slow,
    "diverging": diverging,
    "repeated": repeated,
    "damaged": damaged,
    "hostile": hostile,
    "long": lambda folder: healthy(folder, 100_000, experts=False),
    "muon": lambda folder: healthy(
        folder, seed=11, lr=6e-4, rate=0.93, optimizer="muon", shift=-0.085
    ),
    "one-line": lambda folder: write_run(folder, make_steps(1), []),
    "empty": lambda folder: write_run(folder, [], []),
}


if __name__ == "__main__":
    for name, make in KINDS.items():
        make(Path(sys.argv[1]) / name)
