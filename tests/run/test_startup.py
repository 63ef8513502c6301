"""Ranks that cannot become one run are told why, all of them, before the first step."""

import contextlib
import http.server
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import attrs
import pytest
import rank_processes
import torch
import torch.distributed as dist
from rank_processes import free_port
from threads import run_threads

import trainkit as tk
from trainkit import mesh
from trainkit.mesh import rendezvous, rendezvous_store
from trainkit.mesh.axes import open_gloo_axis
from trainkit.mesh.launch import Launch
from trainkit.mesh.rendezvous_store import Registration, find_trouble, missing_ranks
from trainkit.run.startup import check_ranks_agree, find_difference, make_code_facts
from trainkit.tools.testing import run_ranks
from trainkit.types import SOLO, ConfigError, Layout, PeerError, PreemptedError, Share


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return how the ranks of runs that cannot start ended; they go on beside each other."""
    folder = tmp_path_factory.mktemp("starts")
    with socket.socket() as taken:  # by a program that listens, and never answers
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        begin = {
            "fine": partial(rank_processes.start, fault="", ranks=[0, 1]),
            "twice": partial(rank_processes.start, fault="", ranks=[0, 1, 1], worlds=[3, 3, 3]),
            "worlds": partial(rank_processes.start, fault="", ranks=[0, 1], worlds=[2, 3]),
            "missing": partial(
                rank_processes.start, fault="", ranks=[0, 2], worlds=[3, 3], start_timeout=6
            ),
            "nobody": partial(
                rank_processes.start, fault="", ranks=[1], worlds=[2], start_timeout=4
            ),
            "taken": partial(
                rank_processes.start, fault="", ranks=[0, 1], port=port, start_timeout=6
            ),
            "differ": partial(rank_processes.start, fault="differ", ranks=[0, 1]),
        }
        started = {name: call(folder / name) for name, call in begin.items()}
        return {name: rank_processes.wait(run) for name, run in started.items()}


def codes(run):
    return [rank.code for rank in run]


def test_ranks_that_meet_begin(runs):
    assert codes(runs["fine"]) == [0, 0], runs["fine"]


@pytest.mark.case("L3")
def test_two_processes_with_one_rank_are_named_on_all(runs):
    run = runs["twice"]
    assert codes(run) == [64, 64, 64], run
    assert all("rank 1 has come twice: process" in rank.error for rank in run)


@pytest.mark.case("L4")
def test_ranks_that_disagree_on_the_world_are_told_both_numbers(runs):
    run = runs["worlds"]
    assert codes(run) == [64, 64], run
    want = "rank 1 says that there are 3 processes, rank 0 says 2"
    assert all(want in rank.error for rank in run)


@pytest.mark.case("L5")
def test_missing_ranks_are_named_when_the_time_is_over(runs):
    run = runs["missing"]
    assert codes(run) == [68, 68], run
    assert all("waiting for rank 1 of 3" in rank.error for rank in run)
    assert all(rank.seconds > 4 for rank in run)


@pytest.mark.case("L5", "L6")
def test_an_address_where_nobody_listens_is_named(runs):
    (rank,) = runs["nobody"]
    assert rank.code == 68
    assert "rank 1 of 2 was waiting for rank 0" in rank.error
    assert "could not connect to 127.0.0.1:" in rank.error


@pytest.mark.case("L6", "R10")
def test_a_port_that_is_taken_is_named_by_both_sides(runs):
    first, second = runs["taken"]
    assert (first.code, second.code) == (64, 68), runs["taken"]
    assert "rank 0 cannot listen at 127.0.0.1:" in first.error
    assert "the port is taken" in first.error
    assert "rank 1 connected to 127.0.0.1:" in second.error


@pytest.mark.case("L7")
def test_a_rank_with_another_seed_is_named_before_the_first_step(runs):
    run = runs["differ"]
    assert codes(run) == [64, 64], run
    want = "check_ranks_agree: ranks differ in seed: rank 1 has 1, the others have 0"
    assert all(want in rank.error for rank in run)


# ------------------------------------------------------------------------------------ one process


@pytest.mark.case("E1", "L5")
def test_who_is_asked_to_stop_does_not_wait_for_the_missing(monkeypatch):
    monkeypatch.setattr(rendezvous, "_STOP_PATIENCE", 0.2)
    gate = threading.Event()
    with pytest.raises(PreemptedError, match=r"asked to stop \(SIGINT\), and not all") as caught:
        rendezvous._run_with_timeout(gate.wait, 60.0, lambda: "SIGINT")
    assert caught.value.code == 75
    gate.set()
    assert rendezvous._run_with_timeout(gate.wait, 60.0, lambda: "SIGINT") is True  # all had come
    gate.clear()
    assert (
        rendezvous._run_with_timeout(gate.wait, 0.5) is None
    )  # the control: nobody asks, time is up
    gate.set()


class QuietServer(http.server.ThreadingHTTPServer):
    """Says nothing of clients that leave before they are answered."""

    def handle_error(self, request, client_address):
        del request, client_address


@contextlib.contextmanager
def web_server():
    """Serve HTTP on a port, and yield its number."""
    handler = http.server.BaseHTTPRequestHandler
    with QuietServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.mark.case("L6")
@pytest.mark.parametrize("rank", [0, 1])
def test_another_program_at_the_address_is_named_by_what_it_answers(rank, monkeypatch):
    monkeypatch.setattr(rendezvous, "_STORE_GRACE", 0.2)
    monkeypatch.setattr(rendezvous, "_PORT_GRACE", 0.2)
    begin, long = time.monotonic(), timedelta(minutes=10)
    with web_server() as port:
        launch = Launch(rank, 2, 0, address="127.0.0.1", port=port)
        with pytest.raises(ConfigError, match=r'another program.* answers "HTTP/1\.0 501'):
            rendezvous.open_world(launch, "gloo", timeout=long, start_timeout=long)
    assert time.monotonic() - begin < 60


@pytest.mark.case("L5")
def test_who_waits_says_for_whom(monkeypatch, capfd):
    monkeypatch.setattr(rendezvous_store, "_REMINDER", 0.1)
    store = dist.HashStore()
    first, second = (Launch(rank, 3, 0, address="node7", port=29500) for rank in (0, 2))
    soon = time.monotonic() + 0.5
    begin = [partial(rendezvous_store.session_name, x, store, soon) for x in (first, second)]
    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(one) for one in begin]:
            with pytest.raises(PeerError, match="still waiting for rank 1 of 3"):
                future.result()
    said = capfd.readouterr().err.splitlines()
    assert 1 <= len(said) <= 5
    assert "rank 0 has been waiting for rank 1 of 3 for 0 s, at node7:29500" in said[0]
    nobody = Launch(1, 2, 0, address="127.0.0.1", port=free_port())
    with pytest.raises(PeerError, match="rank 1 of 2 was waiting for rank 0"):
        rendezvous._wait_for_listener(nobody, time.monotonic() + 0.5)
    assert "rank 1 has been waiting for rank 0 of 2 for" in capfd.readouterr().err


def meet(rank, world, store, *, seconds=5.0):
    """Return what a rank takes from the store: the name of the session."""
    launch = Launch(rank, world, 0, address="node7", port=29500)
    return rendezvous_store.session_name(launch, store, time.monotonic() + seconds)


def meet_all(store, world=2):
    """Return the names that all ranks take from a store."""
    with ThreadPoolExecutor(world) as threads:
        found = [threads.submit(meet, rank, world, store) for rank in range(world)]
        return [future.result() for future in found]


def test_what_earlier_attempts_left_in_the_store_does_not_keep_ranks_apart():
    """An agent's store outlives its workers, which may have died at any point of the start."""
    store = dist.HashStore()
    first, same = meet_all(store)  # rank 0 died before it cleared this
    assert first == same
    second, same = meet_all(store)
    assert second == same != first
    with pytest.raises(PeerError, match="rank 1 of 2"):  # rank 0 alone; then both come
        meet(0, 2, store, seconds=0.1)
    third, same = meet_all(store)
    assert third == same not in {first, second}
    with ThreadPoolExecutor(1) as threads:  # rank 1 waits under the third attempt's name
        early = threads.submit(meet, 1, 2, store)
        time.sleep(0.2)
        assert not early.done()
        assert meet(0, 2, store) == early.result() not in {first, second, third}
    rendezvous_store.clear_registrations(store)
    five, same = meet_all(store, world=3)[1:]
    assert five == same


def join_as_agents_would(restarts, port):
    """Return the sum over both ranks, which have each another number of restarts."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = restarts[dist.get_rank()]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.barrier()
    dist.destroy_process_group()
    with tk.parallel_session() as ps:
        return int(tk.all_sum(torch.tensor(1), ps.world))


def test_ranks_of_agents_that_joined_at_different_times_meet():
    assert run_ranks(join_as_agents_would, 2, ["1", "0"], free_port()) == [2, 2]


def test_who_is_missing_and_what_is_wrong():
    seats = [Registration(rank, 4, "a", 10 + rank) for rank in (0, 3)]
    assert missing_ranks(seats, 4) == [1, 2]
    assert find_trouble(seats, 4) is None
    assert find_trouble([*seats, Registration(3, 4, "b", 13)], 4).startswith(
        "rank 3 has come twice"
    )
    assert find_trouble([Registration(0, 4, "a", 1), Registration(7, 8, "a", 2)], 4).startswith(
        "rank 7 says"
    )


def decide(seed, axis):
    """Return what ranks do that differ in their seed: they are refused."""
    try:
        check_ranks_agree(
            axis, {"seed": seed(axis), "data": {"fingerprint": "f"}} | make_code_facts()
        )
    except ConfigError as error:
        return str(error)
    torch_seed = torch.tensor(float(seed(axis)))
    return float(tk.all_sum(torch_seed, axis))


@pytest.mark.case("L7")
def test_what_differs_is_refused_and_what_is_equal_is_not():
    assert run_threads(partial(decide, lambda _: 3), 3) == [9.0] * 3
    for told in run_threads(partial(decide, lambda axis: axis.index // 2), 3):
        assert "ranks differ in seed: rank 2 has 1, the others have 0" in told


@pytest.mark.case("L7")
def test_without_the_agreement_ranks_with_different_seeds_train_on(monkeypatch):
    monkeypatch.setitem(globals(), "check_ranks_agree", lambda *_: None)
    assert run_threads(partial(decide, lambda axis: axis.index // 2), 3) == [1.0] * 3


@pytest.mark.case("L7")
def test_every_kind_of_difference_is_found():
    same = {"seed": 1, "files": ["a", "b"]}
    assert find_difference([same, same]) is None
    field, told = find_difference([same, same | {"files": ["a"]}])
    assert (field, told) == (
        "files",
        'ranks differ in files: rank 1 has ["a"], the others have ["a","b"]',
    )
    assert find_difference([same, same | {"more": 1}])[1].endswith(
        "rank 1 has 1, the others have none"
    )
    assert "seed too" in find_difference([{"a": 1, "seed": 1}, {"a": 2, "seed": 2}])[1]


@pytest.mark.case("L7")
def test_another_copy_of_the_recipe_is_another_code(tmp_path, monkeypatch):
    recipe = tmp_path / "recipe.py"
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(recipe), raising=False)
    recipe.write_text("lr = 1")
    one = make_code_facts()
    assert make_code_facts() == one
    recipe.write_text("lr = 2")
    assert make_code_facts()["recipe source"] != one["recipe source"]


# ------------------------------------------------------------------------------ twins, first words


def fail():
    raise KeyError("x")


def twins():
    """Return what two axes over the same ranks carry at the same time, and what is left."""
    found = []
    with tk.parallel_session(dp_replicate=2) as ps:
        before = len(torch.distributed.distributed_c10d._world.pg_map)
        with open_gloo_axis(ps.world) as twin, open_gloo_axis(ps.dp_shard, name="pair") as pair:
            flag = torch.tensor([twin.index])
            under_way = torch.distributed.all_reduce(flag, group=twin.group, async_op=True)
            found += [int(tk.all_sum(torch.tensor(1), ps.world)), pair.name]
            under_way.wait()
            found += [int(flag), int(tk.all_sum(torch.tensor(ps.world.index), pair))]
        found.append(len(torch.distributed.distributed_c10d._world.pg_map) == before)
        begin = time.monotonic()
        try:
            with open_gloo_axis(ps.world, timeout=timedelta(seconds=40)) as twin:
                if twin.index == 0:  # a vote that nobody else gives: nobody waits for it
                    torch.distributed.all_reduce(flag, group=twin.group, async_op=True)
                fail()
        except KeyError:
            del twin
        found.append(time.monotonic() - begin < 20)
    return found


def test_a_twin_axis_communicates_beside_its_original():
    found = run_ranks(twins, 4)
    pairs = [1, 1, 5, 5]
    assert found == [[4, "pair", 6, pairs[rank], True, True] for rank in range(4)]
    world = mesh.solo_parallel().world
    with open_gloo_axis(world) as twin:
        assert twin is world


def unanswered():
    with tk.parallel_session() as ps:
        if ps.world.index == 1:
            time.sleep(1)
            rendezvous.check_groups([ps.world.group], ps.device, seconds=30)  # 0 has given it up
            return "slept"
        try:
            rendezvous.check_groups([ps.world.group], ps.device, seconds=0.3)
        except PeerError as error:
            return str(error)
    return "answered"


def test_a_group_that_does_not_answer_in_time_is_named():
    late, second = run_ranks(unanswered, 2)
    assert second == "slept"
    assert late.startswith("parallel_session: ranks [0, 1] cannot communicate over gloo: no answer")


def of_backends(config):
    """Return an axis of two ranks whose group says that it has these backends."""
    return attrs.evolve(SOLO, share=Share(0, 2), group=StandIn(config))


class StandIn:
    def __init__(self, config):
        self.config = config

    def size(self):
        return 2


@pytest.fixture
def stand_ins(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: group.config)
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda _: [0, 1])


@pytest.mark.usefixtures("stand_ins")
def test_a_group_is_tried_on_every_device_that_it_will_serve(monkeypatch):
    both, cpu = StandIn("cpu:gloo,cuda:nccl"), torch.device("cpu")
    tried = []

    def answer(group, device):
        tried.append((group, device))
        if device.type == "cuda":
            raise RuntimeError("NCCL error in: socket.cc\nconnect timed out")
        return 2.0

    monkeypatch.setattr(rendezvous, "_sum_ones", answer)
    rendezvous.check_groups([both], cpu, seconds=5)
    assert tried == [(both, cpu)]
    with pytest.raises(PeerError, match=r"over nccl: NCCL error in: socket\.cc") as caught:
        rendezvous.check_groups([both], torch.device("cuda", 1), seconds=5)
    assert tried[1:] == [(both, cpu), (both, torch.device("cuda", 1))]
    assert "NCCL_SOCKET_IFNAME" in caught.value.hint
    monkeypatch.setattr(rendezvous, "_sum_ones", lambda *_: 3.0)
    with pytest.raises(PeerError, match="their sum of ones is 3"):
        rendezvous.check_groups([both], cpu, seconds=5)


@pytest.mark.usefixtures("stand_ins")
def test_offloading_over_groups_without_the_cpu_is_refused():
    from trainkit.parallel import fsdp

    ps = attrs.evolve(mesh.solo_parallel(), fsdp=of_backends("cuda:nccl"))
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="communicates over nccl alone, which cannot sum them"):
        fsdp(Layout(cpu_offload=True), blocks="*")(model, ps)
