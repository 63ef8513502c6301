"""Advantages are those of the papers, group by group and document by document."""

import pytest
import torch
from packed_answers import drawn

from trainkit.post.objectives.advantages import gae, group_advantages, leave_one_out

GROUPS = torch.tensor([0, 2, 0, 1, 2, 0, 2])


def plain_gae(rewards, values, after, *, discount, trace):
    """Return the estimates of one document, backwards as the paper sums them."""
    found, last = [], 0.0
    for step in reversed(range(len(rewards))):
        following = values[step + 1] if step + 1 < len(values) else after
        last = rewards[step] + discount * following - values[step] + discount * trace * last
        found.insert(0, last)
    return torch.stack(found)


@pytest.mark.parametrize(("discount", "trace"), [(1.0, 0.95), (0.9, 0.7), (0.97, 1.0), (1.0, 0.0)])
def test_gae_of_packed_rows_is_that_of_each_document(discount, trace):
    lengths = [[5, 1, 9], [15]]
    ids = torch.full((2, 17), -1)
    for row, documents in enumerate(lengths):
        sizes = torch.tensor(documents)
        ids[row, 1 : 1 + sum(documents)] = torch.arange(len(documents)).repeat_interleave(sizes)
    rewards, values = drawn(2, 17, seed=1), drawn(2, 17, seed=2)
    rewards[ids < 0], values[ids < 0] = torch.nan, torch.nan
    cut_off = torch.full((2, 17), torch.nan, dtype=torch.float64)  # is seen at last steps alone
    for places, value in (((0, 5), 0.0), ((0, 6), 0.7), ((0, 15), -0.4), ((1, 15), 1.3)):
        cut_off[places] = value
    for bootstrap in (None, cut_off):
        found = gae(rewards, values, ids, bootstrap=bootstrap, discount=discount, trace=trace)
        for row, documents in enumerate(lengths):
            for document in range(len(documents)):
                own = ids[row] == document
                after = 0.0 if bootstrap is None else cut_off[row][own][-1]
                parts = rewards[row][own], values[row][own], after
                want = plain_gae(*parts, discount=discount, trace=trace)
                torch.testing.assert_close(found[row][own], want)
        assert (found[ids < 0] == 0).all()


def test_groups_are_compared_with_themselves():
    rewards = drawn(7, seed=4)
    found = group_advantages(rewards, GROUPS, num_groups=4)
    plain = group_advantages(rewards, GROUPS, num_groups=4, deviation=False)
    others = leave_one_out(rewards, GROUPS, num_groups=4)
    for group in range(3):
        own = rewards[group == GROUPS]
        above, count = own - own.mean(), len(own)
        torch.testing.assert_close(plain[group == GROUPS], above)
        if count == 1:
            assert found[group == GROUPS] == others[group == GROUPS] == 0
            continue
        torch.testing.assert_close(found[group == GROUPS], above / (own.std() + 1e-4))
        want = own - (own.sum() - own) / (count - 1)
        torch.testing.assert_close(others[group == GROUPS], want)


def test_equal_rewards_are_no_advantage_however_large():
    rewards = torch.tensor([*[10_000.1] * 10, 7.0])  # in fp32 the mean of these is another number
    groups = torch.tensor([*[0] * 10, 1])
    for found in (
        group_advantages(rewards, groups, num_groups=2),
        leave_one_out(rewards, groups, num_groups=2),
    ):
        assert torch.equal(found, torch.zeros(11))


@pytest.mark.parametrize("function", [group_advantages, leave_one_out])
def test_rewards_and_groups_must_fit(function):
    with pytest.raises(ValueError, match=r"advantages: .* got \(3,\) and \(2,\)"):
        function(torch.ones(3), torch.zeros(2, dtype=torch.int64), num_groups=1)
    with pytest.raises(ValueError, match=r"advantages: rewards must be floating, got torch.int64"):
        function(torch.ones(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), num_groups=1)
