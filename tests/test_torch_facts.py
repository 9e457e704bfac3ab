"""What torch itself does where a lesson speaks of it: the order of a sum, uneven inputs, a sampler that repeats."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.data import DistributedSampler


def ask(world: int, question: str) -> list:
    """Return the answers of `world` real ranks, in rank order."""
    done = subprocess.run([sys.executable, str(Path(__file__).with_name("torch_facts.py")), str(world), question],
                          capture_output=True, text=True, timeout=110, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("world", "possible"), [(4, {0, 2}), (8, {0, 2, 4})])
def test_all_ranks_hold_the_same_sum_though_its_order_depends_on_the_position(world, possible):
    # fp32: 1 + 2^-24 is a tie and rounds to 1, 2^-24 + 2^-24 is exact: the order decides, in units of 2^-23 above 1.
    sums = ask(world, "reduced")
    assert all(one == sums[0] for one in sums)
    assert {(value - 1) * 2**23 for value in sums[0]} == possible
    exact = (world - 1) / 2
    assert exact not in possible  # No element is the exact sum.


@pytest.mark.timeout(120)
def test_a_rank_that_ran_out_of_data_still_counts_unless_told_otherwise():
    # DistributedDataParallel's join: by default a gradient is divided by all ranks that there were at first.
    _, rank1 = ask(2, "joined")
    assert rank1 == {"initial": [3.0, 4.0], "effective": [3.0, 8.0]}


def test_a_distributed_sampler_repeats_samples_to_make_shares_equal():
    def shares(drop_last: bool) -> list[list[int]]:
        return [list(DistributedSampler(range(10), 4, rank, shuffle=False, drop_last=drop_last)) for rank in range(4)]

    assert shares(False) == [[0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1]]
    assert shares(True) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert sum(map(len, shares(False))) - 10 == 2
