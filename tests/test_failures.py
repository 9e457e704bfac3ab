"""Who broke a run: named, with what happened and what to do, and told once."""

from __future__ import annotations

import os
import signal
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import PATIENCE_S, alive, play, until

import gdlab as gd
from gdlab.backends.devices import place
from gdlab.backends.failures import KINDS, Failure, PeerLost, first_cause, of_exit, read_failure, write_failure
from gdlab.backends.runs import Run
from gdlab.backends.shared_state import SharedState


def launched(experiment: gd.Experiment | None = None, **more: float) -> Run:
    """Launch something that lasts, and wait until it runs."""
    slow = gd.Experiment(problem=gd.Quadratic(), workers=3, compute_time=0.02, updates=100_000)
    run = gd.launch(experiment or slow, **more)
    until(lambda: run.state != "starting", "the run runs")
    return run


def failure_of(run: Run) -> gd.RankFailed:
    """Wait for a run's failure, and see that nobody is left."""
    with pytest.raises(gd.RankFailed) as caught:
        run.wait(PATIENCE_S)
    assert run.state == "failed" and not alive(run._pids.values())
    ended = run.trace.ended
    assert (ended["how"], ended["rank"], ended["kind"]) == ("failed", caught.value.rank, caught.value.kind)
    assert str(caught.value).count("\n") == 0 and str(caught.value).endswith(".")
    return caught.value


# ---- real runs -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("exchange", ["allreduce", "server"])
def test_a_killed_rank_is_named_and_the_trace_stays_readable(exchange: str):
    run = launched(gd.Experiment(problem=gd.Quadratic(), workers=3, compute_time=0.02, updates=100_000,
                                 strategy=gd.Sync(exchange=exchange)))
    until(lambda: len(run.trace.applied) > 3, "some updates")
    os.kill(run.pids[2], signal.SIGKILL)
    error = failure_of(run)
    assert (error.rank, error.cause, error.kind) == (2, "SIGKILL", "signal")
    assert str(error).startswith("Rank 2 was killed by SIGKILL while ")
    assert len(error.trace.applied) > 3 and len(error.trace.path) > 1


def test_a_killed_server_is_named():
    run = launched(gd.Experiment(problem=gd.Quadratic(), workers=2, compute_time=0.02, updates=100_000,
                                 strategy=gd.Async()))
    os.kill(run._pids["server0"], signal.SIGKILL)
    error = failure_of(run)
    assert (error.rank, error.cause) == ("server", "SIGKILL") and str(error).startswith("The server was killed")


def test_a_killed_evaluator_is_named():
    run = launched()
    os.kill(run._pids["evaluator0"], signal.SIGKILL)
    assert failure_of(run).rank == "evaluator"


@pytest.mark.parametrize("strategy", [gd.Sync(), gd.Async()], ids=["Sync", "Async"])
def test_an_exception_in_one_rank_is_raised_here_with_its_type_message_and_traceback(strategy):
    def factory():
        import os

        import torch

        class Fragile(torch.nn.Linear):
            calls = 0

            def forward(self, x):
                self.calls += 1
                # What a rank prints goes to a file that bears its name.
                if self.calls > 20 and os.readlink("/proc/self/fd/1").endswith("log-rank2.txt"):
                    raise ZeroDivisionError("a reader's own mistake")
                return super().forward(x)

        x = torch.arange(40.0).reshape(20, 2) / 40
        return Fragile(2, 1), torch.nn.functional.mse_loss, (x, x.sum(1, keepdim=True))

    exp = gd.Experiment(problem=factory, workers=3, compute_time=0.005, updates=100_000, strategy=strategy)
    error = failure_of(launched(exp))
    assert (error.rank, error.cause) == (2, "ZeroDivisionError: a reader's own mistake")
    assert "in forward" in str(error.__cause__)


@pytest.mark.parametrize("exchange", ["allreduce", "server"])
def test_a_halted_rank_is_named_after_the_timeout(exchange: str):
    run = launched(gd.Experiment(problem=gd.Quadratic(), workers=3, compute_time=0.02, updates=100_000,
                                 strategy=gd.Sync(exchange=exchange)), timeout_s=3)
    os.kill(run.pids[1], signal.SIGSTOP)
    error = failure_of(run)
    assert (error.rank, error.kind) == (1, "timeout") and "halted" in str(error) and "timeout_s" in str(error)


# ---- dummy processes -----------------------------------------------------------------------------------------------

def test_a_silent_rank_is_named_with_what_it_did_and_its_stack(monkeypatch):
    play(monkeypatch, "silent")
    error = failure_of(launched(timeout_s=1))
    assert (error.rank, error.kind) == (1, "timeout") and "while computing step 7" in str(error)
    assert "stuck" in (error.trace.folder / "log-rank1.txt").read_text()


def test_a_rank_that_comes_with_another_collective_is_named(monkeypatch):
    play(monkeypatch, "differs")
    assert failure_of(launched(timeout_s=1)).rank == 1


def test_ranks_that_none_of_them_keeps_waiting_do_not_wait_for_ever(monkeypatch):
    play(monkeypatch, "together")
    error = failure_of(launched(timeout_s=1))
    assert (error.rank, error.kind) == (0, "timeout") and "while communicating" in str(error)


def test_a_rank_that_leaves_without_an_error_is_named(monkeypatch):
    play(monkeypatch, "quits")
    error = failure_of(launched())
    assert (error.rank, error.cause) == (1, "exit code 3 and no error")


# ---- values --------------------------------------------------------------------------------------------------------

def test_an_exception_travels_as_a_value(tmp_path):
    try:
        raise KeyError("weight")
    except KeyError as error:
        write_failure(tmp_path, "rank4", error)
    told = read_failure(tmp_path, "rank4")
    assert (told["type"], told["kind"]) == ("KeyError", "exception") and "in test_an_exception" in told["traceback"]
    assert of_exit(tmp_path, "rank", 4, 1).what == "KeyError: 'weight'"
    assert read_failure(tmp_path, "rank5") is None


def test_an_error_about_a_peer_is_only_a_witness(tmp_path):
    write_failure(tmp_path, "rank0", PeerLost("an all-reduce failed: Connection closed by peer"))
    write_failure(tmp_path, "rank1", PeerLost("an all-reduce failed: timed out", "timeout"))
    assert [of_exit(tmp_path, "rank", rank, 1).kind for rank in (0, 1)] == ["peer", "peer"]


@given(st.permutations([Failure("rank", index, kind, kind) for index, kind in enumerate(KINDS)]))
def test_a_signal_explains_an_exception_explains_a_timeout_explains_a_lost_peer(failures):
    for count in range(len(failures), 0, -1):
        assert first_cause(failures[:count]).kind == min((f.kind for f in failures[:count]), key=KINDS.index)


def test_equal_errors_of_ranks_are_told_once():
    cause = first_cause([Failure("rank", index, "exception", "ValueError: no") for index in (3, 1, 2)])
    assert cause.rank == 1 and cause.sentence().startswith("Ranks 1, 2 and 3 stopped with ValueError: no")


def test_an_error_of_all_is_told_as_the_ranks_and_a_mistake_in_the_experiment_in_its_own_words():
    def factory():
        raise ValueError("no such file.")

    exp = gd.Experiment(problem=factory, workers=2, updates=3, strategy="async")
    error = failure_of(launched(exp))
    assert error.kind == "exception" and "failed with ValueError: no such file" in str(error)
    assert not str(error).startswith(("Rank", "The server"))
    told = first_cause([Failure("server", 0, "exception", "ValueError: no", "starting"),
                        Failure("rank", 1, "exception", "ValueError: no", "starting")])
    assert told.sentence().startswith("Rank 1 stopped with ValueError: no while starting: correct it")


def test_a_slot_keeps_what_its_process_says(tmp_path):
    shared = SharedState.create(tmp_path, 3)
    other = SharedState(tmp_path)
    shared.slot(1).enter("computing", step=7, version=5)
    shared.slot(1).collective(1, 650, 2)
    seen = other.slot(1)
    assert (seen.phase, seen.step, seen.version, seen.sequence) == ("communicating", 7, 5, 1)
    assert seen.fingerprint == (1, 650, 2) and 0 <= time.monotonic() - seen.last_beat < 10
    assert (other.slot(0).phase, other.slot(2).last_beat) == ("starting", 0.0)
    assert not other.stop and not other.target_reached and other.reason == ""
    shared.ask_stop()
    shared.reach_target()
    shared.reason = "seconds"
    assert other.stop and other.target_reached and other.reason == "seconds"


# ---- devices, with counts that are made up --------------------------------------------------------------------------

@pytest.mark.parametrize(("wanted", "ranks", "gpus", "nccl", "device", "backend"), [
    ("auto", 4, 0, True, "cpu", "gloo"),
    ("cpu", 4, 8, True, "cpu", "gloo"),
    ("auto", 4, 8, True, "cuda", "nccl"),
    ("auto", 8, 8, True, "cuda", "nccl"),
    ("auto", 9, 8, True, "cuda", "gloo"),
    ("cuda", 2, 1, True, "cuda", "gloo"),
    ("cuda", 2, 2, False, "cuda", "gloo"),
])
def test_nccl_takes_one_rank_a_gpu_and_gloo_the_rest(wanted, ranks, gpus, nccl, device, backend):
    placement = place(wanted, ranks, gpus, nccl)
    assert (placement.device, placement.group_backend) == (device, backend)
    assert bool(placement.note) == (device == "cuda" and backend == "gloo")


def test_more_ranks_than_gpus_is_said_aloud_and_gpus_are_dealt_out_in_turn():
    placement = place("auto", 3, 2, True)
    assert placement.note == ("3 ranks share 2 GPUs, so gradients meet over gloo, through the host's memory.")
    assert [placement.device_of(rank) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert place("auto", 3, 0, False).device_of(2) == "cpu"


def test_a_gpu_that_is_not_there_is_an_error_in_a_sentence():
    with pytest.raises(gd.ExperimentError, match="needs a GPU and PyTorch finds none here"):
        place("cuda", 1, 0, True)
    with pytest.raises(gd.RankFailed, match="needs a GPU"):
        gd.launch(gd.Experiment(problem=gd.Quadratic(), workers=1, device="cuda")).wait(PATIENCE_S)
