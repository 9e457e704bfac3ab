"""The strategies' state machines: what holds for every order in which workers may push."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gdlab.descent.strategies import Barrier, Free, machine
from gdlab.parts import Async, LocalSGD, Sync


def shared_parts(workers):
    return st.one_of(
        st.builds(Sync, backups=st.integers(0, workers - 1), exchange=st.just("server")),
        st.builds(Async, staleness_bound=st.one_of(st.none(), st.integers(0, 4)), batch=st.integers(1, 5)),
        st.builds(LocalSGD, period=st.integers(1, 4)),
    )


class AnyOrder(RuleBasedStateMachine):
    """Workers compute and push in every order; a late push of a cancelled step may still arrive."""

    @initialize(data=st.data(), workers=st.integers(1, 6))
    def begin(self, data, workers):
        self.strategy = data.draw(shared_parts(workers))
        self.machine = machine(self.strategy, workers)
        self.workers = workers
        self.bound = getattr(self.strategy, "staleness_bound", None)
        self.step = [0] * workers
        self.clock = [0] * workers
        self.computing = {}
        self.late = []
        self.received, self.applied, self.dropped = [], [], []
        self.read_at = {}
        self.versions = 0
        started = self.machine.start()
        assert started == tuple(range(workers))
        for worker in started:
            self.read(worker)

    def read(self, worker):
        self.computing[worker] = (self.step[worker], self.machine.version)
        self.read_at[worker, self.step[worker]] = self.machine.version
        self.step[worker] += 1

    def take(self, decision, worker, step, late=False):
        assert decision.version - self.versions == (1 if decision.apply else 0), "one new version for what is applied"
        before = self.versions
        self.versions = decision.version
        for key, staleness in zip(decision.apply, decision.staleness, strict=True):
            assert staleness == before - self.read_at[key]
            self.applied.append(key)
        self.dropped += decision.dropped
        if late:
            assert decision == ((), (), ((worker, step),), (), (), before)
        for cancelled in decision.cancelled:
            self.late.append((cancelled, *self.computing.pop(cancelled)))
        assert list(decision.released) == sorted(set(decision.released))
        for released in decision.released:
            assert released not in self.computing
            self.read(released)

    @rule(data=st.data())
    def somebody_pushes(self, data):
        worker = data.draw(st.sampled_from(sorted(self.computing)))
        step, version = self.computing.pop(worker)
        self.clock[worker] += 1
        self.received.append((worker, step))
        self.take(self.machine.push(worker, step, version), worker, step)

    @precondition(lambda self: getattr(self, "late", None))
    @rule(data=st.data())
    def a_cancelled_push_arrives_after_all(self, data):
        worker, step, version = self.late.pop(data.draw(st.integers(0, len(self.late) - 1)))
        self.received.append((worker, step))
        self.take(self.machine.push(worker, step, version), worker, step, late=True)

    @invariant()
    def no_push_is_lost_or_applied_twice(self):
        if hasattr(self, "machine"):
            fates = [*self.applied, *self.dropped, *self.machine.pending]
            assert sorted(fates) == sorted(self.received)
            assert len(set(fates)) == len(fates)

    @invariant()
    def somebody_can_always_go_on(self):
        if hasattr(self, "machine"):
            assert self.computing

    @invariant()
    def the_staleness_bound_is_kept(self):
        if hasattr(self, "machine") and self.bound is not None:
            slowest = min(self.clock)
            assert all(self.clock[w] - slowest <= self.bound for w in self.computing)
            # Nobody is held back without need either.
            assert all(self.clock[w] - slowest > self.bound for w in range(self.workers) if w not in self.computing)


AnyOrder.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase


def test_a_barrier_combines_in_rank_order_whoever_was_first():
    barrier = Barrier(3)
    assert barrier.push(2, 0, 0).apply == ()
    assert barrier.push(0, 0, 0).released == ()
    decision = barrier.push(1, 0, 0)
    assert decision.apply == ((0, 0), (1, 0), (2, 0))
    assert decision.staleness == (0, 0, 0)
    assert decision.released == (0, 1, 2)
    assert decision.version == 1


def test_backup_workers_make_the_late_ones_give_up_their_step():
    barrier = Barrier(3, backups=1)
    barrier.push(2, 0, 0)
    decision = barrier.push(0, 0, 0)
    assert decision.apply == ((0, 0), (2, 0))
    assert decision.cancelled == (1,)
    assert decision.released == (0, 1, 2)
    late = barrier.push(1, 0, 0)
    assert late.dropped == ((1, 0),)
    assert late.apply == late.released == ()


def test_staleness_counts_the_updates_of_others_between_read_and_write():
    free = Free(4)
    staleness = []
    versions = [0] * 4
    for turn in range(3):
        for worker in range(4):
            decision = free.push(worker, turn, versions[worker])
            versions[worker] = decision.version
            staleness += decision.staleness
    assert staleness == [0, 1, 2, 3] + [3] * 8


def test_a_batch_makes_one_version_and_its_pusher_goes_on_at_once():
    free = Free(3, batch=2)
    first = free.push(1, 0, 0)
    assert first.apply == () and first.released == (1,) and first.version == 0
    assert free.pending == ((1, 0),)
    second = free.push(0, 0, 0)
    assert second.apply == ((1, 0), (0, 0)) and second.version == 1 and second.released == (0,)
    assert free.push(1, 1, 0).apply == ()
    assert free.push(2, 0, 0).staleness == (1, 1)


def test_a_bound_holds_the_fast_one_until_the_slowest_has_pushed():
    free = Free(2, staleness_bound=1)
    assert free.push(0, 0, 0).released == (0,)
    assert free.push(0, 1, 1).released == ()
    decision = free.push(1, 0, 0)
    assert decision.released == (0, 1)
    assert decision.staleness == (2,)


def test_a_bound_of_zero_is_a_barrier_that_applies_each_gradient_by_itself():
    free = Free(3, staleness_bound=0)
    assert free.push(1, 0, 0).apply == ((1, 0),)
    assert free.push(0, 0, 0).released == ()
    assert free.push(2, 0, 0).released == (0, 1, 2)
    assert free.version == 3


@pytest.mark.parametrize("bad", [lambda m: m.push(0, 0, 5), lambda m: m.push(0, 0, -1)])
@pytest.mark.parametrize("build", [lambda: Barrier(2), lambda: Free(2)])
def test_a_push_from_a_version_that_does_not_exist_is_refused(bad, build):
    with pytest.raises(ValueError, match="Worker 0 pushed step 0 from version"):
        bad(build())


def test_a_second_push_without_a_read_is_refused():
    barrier = Barrier(2)
    barrier.push(0, 0, 0)
    with pytest.raises(ValueError, match="Worker 0 pushed step 1 after step 0 of the same round"):
        barrier.push(0, 1, 0)
    free = Free(2, staleness_bound=0)
    free.push(0, 0, 0)
    with pytest.raises(ValueError, match="is not computing"):
        free.push(0, 1, 1)


def test_bad_sizes_are_refused_in_a_sentence():
    with pytest.raises(ValueError, match="leave none of 2 workers"):
        Barrier(2, backups=2)
    with pytest.raises(ValueError, match="at least"):
        Free(0)
    with pytest.raises(TypeError, match="No machine for a str"):
        machine("sync", 2)
