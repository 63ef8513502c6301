"""Ranks as threads of one process: for unit tests of functions that communicate by collectives.

8 ranks take some milliseconds, where processes take half a second. It rests on a private part of
torch (the "threaded" process group and its isolation switch, the same in 2.11 and 2.13), so it is
no part of trainkit. There is no point-to-point communication, and torch's random generator is
shared: make random tensors before.
"""

import sys
import threading

import torch.distributed as dist
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

from trainkit.mesh import axis_from_group


def run_threads(fn, world, *args):
    """Return `[fn(axis, *args) on rank 0, on rank 1, ...]`; raise what a rank raised first."""
    store, results, failures = dist.HashStore(), [None] * world, []
    hook = sys.excepthook  # init_process_group puts another in its place

    def rank_main(rank):
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
            results[rank] = fn(axis_from_group(dist.group.WORLD), *args)
        except BaseException as failure:  # noqa: BLE001 (told to the caller)
            failures.append(failure)
            ProcessLocalGroup.exception_handle(failure)  # wakes the ranks that wait for this one
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    _set_thread_isolation_mode(True)
    state = _install_threaded_pg()
    vars(state).setdefault("comms", [])  # destroy_process_group of torch 2.11 reads it
    try:
        threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        _uninstall_threaded_pg()
        _set_thread_isolation_mode(False)
        ProcessLocalGroup.reset()
        sys.excepthook = hook
    if failures:
        raise failures[0]
    return results
