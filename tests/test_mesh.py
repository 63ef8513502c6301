"""Every axis of every layout, and the environments it is made from."""

import contextlib
from datetime import timedelta
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trainkit as tk
from trainkit.mesh import get_world_size, read_launch
from trainkit.mesh.axes import partitions_of
from trainkit.mesh.launch import launch_from_slurm
from trainkit.tools.testing import run_ranks
from trainkit.types import ConfigError, Layout

NAMES = Layout().axes["world"]
AXES = [
    "world pp dp dp_replicate dp_shard sp ring ulysses tp ep fsdp expert_fsdp loss sp_unfolded"
][0].split()


def test_one_process_has_no_process_group():
    with tk.parallel_session() as ps:
        assert not torch.distributed.is_initialized()
        for name in AXES:
            axis = getattr(ps, name)
            assert (axis.name, axis.index, axis.count, axis.group, axis.mesh) == (
                name,
                0,
                1,
                None,
                None,
            )


def members(layout):
    """Return for each axis (index, count, the ranks of its group)."""
    with tk.parallel_session(layout) as ps:
        found = {}
        for name in AXES:
            axis = getattr(ps, name)
            ranks = (
                tuple(torch.distributed.get_process_group_ranks(axis.group)) if axis.group else ()
            )
            total = tk.all_sum(torch.tensor(1), axis)
            assert int(total) == axis.count
            assert axis.mesh is None or axis.mesh.size() == axis.count
            found[name] = axis.index, axis.count, ranks
        return found


def in_turn(function, *every):
    """Return what `function` gives of each, one after the other in the same ranks."""
    return [function(each) for each in every]


def test_axes_nest_in_the_order_of_the_design():
    last = run_ranks(members, 8, Layout(dp_replicate=2, dp_shard=2, ring=2))[6]
    assert last["dp_replicate"] == (1, 2, (2, 6))
    assert last["dp_shard"] == (1, 2, (4, 6))
    assert last["ring"] == (0, 2, (6, 7))
    assert last["dp"] == (3, 4, (0, 2, 4, 6))
    assert last["fsdp"] == (2, 4, (4, 5, 6, 7))
    assert last["loss"] == (6, 8, tuple(range(8)))
    assert last["sp_unfolded"] == (0, 1, ())


def test_fold_sp_chooses_what_parameters_are_sharded_over():
    wanted = {"all": (4, 1), "ring": (2, 2), "ulysses": (2, 2), "none": (1, 4)}
    every = [Layout(dp_shard=1, ring=2, ulysses=2, fold_sp=fold_sp) for fold_sp in wanted]
    found = run_ranks(in_turn, 4, members, *every)[3]
    sizes = [(axes["fsdp"][1], axes["sp_unfolded"][1]) for axes in found]
    assert dict(zip(wanted, sizes, strict=True)) == wanted


def test_experts_are_a_factor_of_what_parameters_are_sharded_over_and_may_be_strided():
    every = Layout(ep=2), Layout(ep=2, ep_adjacent=False)
    near, strided = run_ranks(in_turn, 4, members, *every)[2]
    assert (near["ep"], near["expert_fsdp"]) == ((0, 2, (2, 3)), (1, 2, (0, 2)))
    assert (strided["ep"], strided["expert_fsdp"]) == ((1, 2, (0, 2)), (0, 2, (2, 3)))


def meshes_of_experts(layout):
    """Return the sizes of both meshes by name, and the ranks of this rank's slices."""
    with tk.parallel_session(layout) as ps:
        sizes = [
            dict(zip(m.mesh_dim_names, m.shape, strict=True)) for m in (ps.mesh, ps.expert_mesh)
        ]
        slices = {n: ps.expert_mesh[n].mesh.tolist() for n in ("expert_fsdp", "ep", "tp")}
        return sizes, slices


def test_experts_live_on_slices_of_one_mesh_that_has_ep_in_place_of_fsdp():
    near = Layout(dp_replicate=2, dp_shard=2, tp=2, ep=2)
    strided = Layout(dp_shard=4, tp=2, ep=2, ep_adjacent=False)
    found = run_ranks(in_turn, 8, meshes_of_experts, near, strided)[5]
    (mesh, experts), slices = found[0]
    assert mesh == {"dp_replicate": 2, "fsdp": 2, "tp": 2}
    assert experts == {"dp_replicate": 2, "expert_fsdp": 1, "ep": 2, "tp": 2}
    assert slices == {"expert_fsdp": [5], "ep": [5, 7], "tp": [4, 5]}
    (mesh, experts), slices = found[1]  # the same mesh over other ranks
    assert mesh == {"fsdp": 4, "tp": 2}
    assert experts == {"expert_fsdp": 2, "ep": 2, "tp": 2}
    assert [*experts] == ["expert_fsdp", "ep", "tp"]  # as FSDP2 wants it
    assert slices == {"expert_fsdp": [5, 7], "ep": [1, 5], "tp": [4, 5]}


@given(st.permutations([1, 1, 1, 2, 3, 2]), st.sampled_from(["all", "ring", "ulysses", "none"]))
def test_every_axis_partitions_the_world(degrees, fold_sp):
    pp, dp_replicate, dp_shard, ring, ulysses, tp = degrees
    layout = Layout(
        pp=pp,
        dp_replicate=dp_replicate,
        dp_shard=dp_shard,
        ring=ring,
        ulysses=ulysses,
        tp=tp,
        fold_sp=fold_sp,
    )
    found = partitions_of(layout)
    for name, lists in found.items():
        assert sorted(rank for ranks in lists for rank in ranks) == list(range(12)), name
    assert (
        len(found["fsdp"][0])
        * len(found["sp_unfolded"][0])
        * len(found["dp_replicate"][0])
        * (len(found["tp"][0]) * len(found["pp"][0]))
        == 12
    )


@pytest.mark.parametrize("name", [*NAMES, "ep"])
@pytest.mark.parametrize("degree", [0, -2])
def test_degrees_below_one_are_refused(name, degree):
    with (
        pytest.raises(ConfigError, match=f"{name} must be above 0,.* got {degree}"),
        tk.parallel_session(**{name: degree}),
    ):
        pass


@pytest.mark.parametrize(
    "session",
    [
        partial(tk.parallel_session, cpu_offload=True),
        partial(tk.parallel_session, Layout(tp=1), reduce="each"),
        partial(tk.parallel_session, schedule="gpipe"),
        partial(tk.parallel_session, reshard_after_forward=False),
    ],
)
def test_a_field_that_a_session_does_not_use_is_refused_as_a_keyword(session):
    name = list(session.keywords)[-1]
    with pytest.raises(ConfigError, match=f"'{name}' changes nothing here"), session():
        pass
    with tk.parallel_session(Layout(**session.keywords), fold_sp="none", ep_adjacent=False) as ps:
        assert ps.world.count == 1


def test_a_product_that_is_not_the_world_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"multiply to 6 .* but there are 4 processes"):
        Layout(dp_shard=3, tp=2).over(4)
    with pytest.raises(ConfigError, match=r"multiply to 3 .* but there are 4"):
        Layout(tp=3).over(4)


def test_experts_that_do_not_divide_and_unknown_folds_are_refused():
    with pytest.raises(ConfigError, match="ep 3 does not divide the 4 ranks"):
        Layout(ep=3).over(4)
    with pytest.raises(ConfigError, match="ep 4 does not divide the 2 ranks"):
        Layout(tp=2, ep=4).over(4)  # it divides the world
    with pytest.raises(ConfigError, match="fold_sp must be one of"):
        Layout(fold_sp="some")


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"RANK": "abc"}, "RANK must be .* got 'abc'"),
        ({"RANK": "2"}, "RANK must be .* below 2, got '2'"),
        ({"RANK": "-1"}, "RANK must be .* got '-1'"),
        ({"RANK": None}, "RANK is not set"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE must be .* got '0'"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT must be .* got 'http'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT must be .* got '70000'"),
    ],
    ids=str,
)
def test_a_wrong_environment_is_named(changes, named):
    env = {name: value for name, value in {**TORCHRUN, **changes}.items() if value is not None}
    with pytest.raises(ConfigError, match=named):
        read_launch(env)


def test_torchrun_wins_over_slurm():
    launch = read_launch(
        {**TORCHRUN, "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
    )
    assert (launch.rank, launch.world, launch.port) == (1, 2, 29500)


def test_slurm_ranks_agree_on_where_they_meet():
    common = {"SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "123456"}
    nodes = {"SLURM_JOB_NODELIST": "node-a[03-05,9]-ib,login"}
    found = {
        (launch.address, launch.port)
        for rank in range(4)
        for launch in [launch_from_slurm({**common, **nodes, "SLURM_PROCID": str(rank)})]
    }
    assert found == {("node-a03-ib", 18456)}


def test_the_environment_is_checked_before_a_socket_is_opened(monkeypatch):
    for name, value in {**TORCHRUN, "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.distributed, "init_process_group", pytest.fail)
    with pytest.raises(ConfigError, match="multiply to 3"), tk.parallel_session(tp=3):
        pass


def test_the_world_is_known_before_anything_is_opened(monkeypatch):
    for name in (*TORCHRUN, "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    assert get_world_size() == 1
    for name, value in {**TORCHRUN, "WORLD_SIZE": "7"}.items():
        monkeypatch.setenv(name, value)
    assert get_world_size() == 7
    assert not torch.distributed.is_initialized()
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ConfigError, match="WORLD_SIZE must be"):
        get_world_size()


def test_the_folded_axes_are_the_design_s():
    assert [Layout(fold_sp=x).axes["fsdp"] for x in ("all", "ulysses", "none")] == [
        ("dp_shard", "ring", "ulysses"),
        ("dp_shard", "ulysses"),
        ("dp_shard",),
    ]


def test_a_layout_and_single_fields_of_it_open_the_same_session():
    layout = Layout(tp=2, fold_sp="none")
    with pytest.raises(ConfigError, match="multiply to 2"), tk.parallel_session(layout):
        pass
    with tk.parallel_session(layout, tp=1) as ps:
        assert ps.degrees == dict.fromkeys(layout.degrees, 1)
    with pytest.raises(TypeError, match="dp"), tk.parallel_session(dp=2):
        pass


def left_open():
    assert get_world_size() == 2
    with tk.parallel_session() as ps:
        assert ps.world.count == 2
    return torch.distributed.is_initialized()


def test_an_existing_process_group_is_used_and_left_open():
    assert run_ranks(left_open, 2) == [True, True]


def foreign_group():
    group = torch.distributed.new_group([0, 1])
    axis = tk.axis_from_group(group)
    return int(tk.all_sum(torch.tensor(axis.index + 1), axis)), axis.count


def test_somebody_else_s_group_becomes_an_axis():
    assert run_ranks(foreign_group, 2) == [(3, 2), (3, 2)]


def collectives():
    from trainkit.collectives import all_gather_objects

    with tk.parallel_session() as ps:
        axis, rank = ps.world, ps.world.index
        mine = torch.tensor([rank, -rank])
        return (
            tk.all_sum(mine, axis).tolist(),
            tk.all_max(mine, axis).tolist(),
            tk.broadcast(mine, axis, source=2).tolist(),
            [tk.any_rank(rank == 1, axis), tk.any_rank(False, axis)],
            all_gather_objects({"rank": rank, "text": "x" * rank}, axis),
            mine.tolist(),
        )


def test_collectives_return_new_values_on_all_ranks():
    gathered = [{"rank": rank, "text": "x" * rank} for rank in range(3)]
    for rank, found in enumerate(run_ranks(collectives, 3)):
        assert found == ([3, -3], [2, 0], [2, -2], [True, False], gathered, [rank, -rank])


def fail():
    raise KeyError("x")


def groups_before_and_after():
    world, spoken, aborted = torch.distributed.distributed_c10d._world, [], []
    all_reduce, abort = (
        torch.distributed.all_reduce,
        torch.distributed.distributed_c10d._abort_process_group,
    )

    def listen(x, *args, group, **kwargs):
        spoken.append(group)
        return all_reduce(x, *args, group=group, **kwargs)

    def note(group=None):
        aborted.append(group)
        abort(group)

    torch.distributed.all_reduce = listen
    torch.distributed.distributed_c10d._abort_process_group = note
    before, closed = len(world.pg_map), []
    timeout = timedelta(seconds=77)
    for end in (lambda: None, fail):
        with (
            contextlib.suppress(KeyError),
            tk.parallel_session(dp_replicate=2, timeout=timeout) as ps,
        ):
            options = ps.dp_replicate.group._get_backend(torch.device("cpu")).options
            groups = {ps.dp_replicate.group, ps.dp_shard.group}
            connected = groups < set(spoken)
            inside = options._timeout
            end()
        wanted = groups if end is fail else set()
        closed.append((before == len(world.pg_map), set(aborted) == wanted))
    return closed, inside, connected


@pytest.fixture(scope="module")
def sessions():
    return run_ranks(groups_before_and_after, 4)


def test_groups_have_the_session_s_timeout_and_are_closed_with_it(sessions):
    for closed, timeout, _ in sessions:
        assert [all_gone for all_gone, _ in closed] == [True, True]
        assert timeout == timedelta(seconds=77)


def test_groups_are_aborted_after_an_exception_and_destroyed_else(sessions):
    for closed, *_ in sessions:
        assert [as_due for _, as_due in closed] == [True, True]


def test_every_group_has_communicated_before_the_first_step(sessions):
    assert all(connected for *_, connected in sessions)


def fails_on_rank_one(kind):
    from trainkit.collectives import run_on_all_ranks

    def work():
        if torch.distributed.get_rank() == 1:
            raise {
                "ours": ConfigError("no such thing", hint="fix it"),
                "argument": ValueError("no such number"),
                "other": KeyError("x"),
            }[kind]
        return "done"

    with tk.parallel_session() as ps:
        try:
            return run_on_all_ranks(work, ps.world)
        except Exception as error:  # noqa: BLE001 (any kind is reported)
            return type(error).__name__, str(error), getattr(error, "hint", None)


def test_what_fails_on_one_rank_fails_on_all_and_names_it():
    found = run_ranks(fails_on_rank_one, 2, "ours")
    assert found == [
        ("ConfigError", "rank 1: no such thing: fix it", "fix it"),
        ("ConfigError", "no such thing: fix it", "fix it"),
    ]
    first, _ = run_ranks(fails_on_rank_one, 2, "argument")
    assert first == ("TrainkitError", "rank 1: no such number", None)
    first, _ = run_ranks(fails_on_rank_one, 2, "other")
    assert first == ("RuntimeError", "rank 1 failed: KeyError: 'x'", None)
