"""A trace reads what was written, while it is written, after a kill, and through every export."""

import hashlib
import json
import math
import os
import signal
import subprocess
import sys

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gdlab as gd
from gdlab.backends.job import experiment_of
from gdlab.experiment import MAX_UPDATES
from gdlab.records import MOST_UPDATES, PATH_LIMIT_BYTES, path_dtype, path_stage, path_stride
from gdlab.trace import (
    EventWriter,
    Follower,
    LossWriter,
    PathWriter,
    Trace,
    TraceError,
    read_run,
    write_run,
    write_surface,
)


@pytest.fixture
def folder(tmp_path):
    experiment = gd.Experiment(problem="ravine", strategy="async", target_loss=0.2)
    write_run(tmp_path, {"experiment": json.loads(experiment.to_json()),
                         "environment": {"backend": "virtual", "clock": "virtual"}, "ended": None})
    return tmp_path


def record(folder, pushes=10, workers=4):
    """Write `pushes` updates, each 0.1 s after the last, read 0.1 s before; losses 1/version."""
    events, path, losses = EventWriter(folder, "server"), PathWriter(folder, 2, "float32", 200), LossWriter(folder)
    path.append(0, np.zeros(2))
    losses.append(0, 1.0)
    for i in range(pushes):
        events.push(worker=i % workers, step=i // workers, read_version=i, version=i + 1, staleness=i % 3,
                    start_s=0.1 * i, computed_s=0.1 * i + 0.05, applied_s=0.1 * i + 0.06)
        events.release(i % workers, i // workers, 0.1 * i + 0.075)
        path.append(i + 1, np.full(2, i + 1))
        losses.append(i + 1, 1 / (i + 1))
    path.finish(pushes, np.full(2, pushes))
    events.close()


def test_a_trace_gives_back_what_was_written(folder):
    record(folder)
    trace = gd.open_trace(folder)
    assert trace.experiment == gd.Experiment(problem="ravine", strategy="async", target_loss=0.2)
    assert list(trace.pushes["version"]) == list(range(1, 11))
    assert np.allclose(trace.pushes["released_s"], np.arange(10) * 0.1 + 0.075)
    assert trace.path.shape == (11, 2) and list(trace.path[:, 0]) == list(range(11))
    assert np.allclose(trace.path_seconds, [0, *(np.arange(10) * 0.1 + 0.06)])
    figures = trace.summary()
    assert figures["updates"] == figures["gradients"] == 10
    assert figures["seconds"] == pytest.approx(0.96) and figures["seconds_to_target"] == pytest.approx(0.46)
    assert figures["wait_fraction"] == pytest.approx(0.025 / 0.075)
    assert figures["mean_staleness"] == pytest.approx(0.9) and figures["final_loss"] == pytest.approx(0.1)


def test_a_push_that_was_never_applied_comes_last_and_is_left_out_of_means(folder):
    record(folder)
    with_late = EventWriter(folder, "server")
    with_late.push(worker=3, step=99, read_version=10, version=-1, start_s=1.0, computed_s=1.1)
    figures = Trace(folder).summary()
    assert figures["dropped"] == 1 and figures["gradients"] == 10 and figures["mean_staleness"] == pytest.approx(0.9)
    assert Trace(folder).pushes["version"][-1] == -1
    with_late.close()


@given(cuts=st.lists(st.integers(1, 400), max_size=12))
def test_a_follower_hands_over_every_record_once_however_the_bytes_arrive(cuts, tmp_path_factory):
    whole, grown = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("grown")
    record(whole)
    data = (whole / "events-server.bin").read_bytes()
    follower, pushes, at = Follower(grown), [], 0
    with open(grown / "events-server.bin", "wb", buffering=0) as file:
        for cut in [*cuts, len(data)]:
            file.write(data[at:at + cut])
            at += cut
            pushes.extend(follower.read().pushes["version"])
    assert pushes == list(range(1, 11)) and not follower.read()


def test_a_live_trace_is_current_and_a_follower_agrees_with_it(folder):
    follower, trace = Follower(folder), Trace(folder)
    assert len(trace.pushes) == len(trace.path) == 0 and math.isnan(trace.summary()["final_loss"])
    record(folder)
    write_surface(folder, 0, x=np.arange(2.0), y=np.arange(3.0), loss=np.zeros((3, 2)), kind="parameters")
    chunk = follower.read()
    assert np.array_equal(chunk.pushes["version"], trace.pushes["version"])
    assert np.array_equal(chunk.path, trace.path) and len(chunk.losses) == 11
    assert chunk.surface["kind"] == trace.surface["kind"] == "parameters" and trace.surface["loss"].shape == (3, 2)
    assert not follower.read()


def test_a_torn_tail_is_dropped_and_counted(folder):
    record(folder)
    with open(folder / "events-server.bin", "ab") as file:
        file.write(b"torn")
    trace = Trace(folder)
    assert trace.torn == 1 and len(trace.pushes) == 10


def test_a_killed_writer_loses_nothing_that_it_had_written(tmp_path):
    program = ("import sys; from gdlab.trace import EventWriter\n"
               "w = EventWriter(sys.argv[1], 'a'); i = 0\n"
               "while True:\n"
               "    w.push(worker=0, step=i, read_version=i, version=i + 1, start_s=0.0); i += 1\n"
               "    if i == 500: print('go', flush=True)\n")
    child = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"go\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    versions = Trace(tmp_path).pushes["version"]
    assert len(versions) >= 500 and list(versions) == list(range(1, len(versions) + 1))


def test_a_buffered_writer_writes_the_same_file(tmp_path):
    for name, buffer in (("plain", 0), ("held", 1 << 16)):
        (tmp_path / name).mkdir()
        writer = EventWriter(tmp_path / name, "a", buffer=buffer)
        for i in range(1000):
            writer.push(worker=0, step=i, read_version=i, version=i, start_s=float(i))
        writer.close()
        writer.close()
    assert (tmp_path / "plain/events-a.bin").read_bytes() == (tmp_path / "held/events-a.bin").read_bytes()


@given(parameters=st.integers(1, 100_000), updates=st.integers(1, 1_000_000))
def test_a_path_stays_within_its_limit_at_the_smallest_power_of_two(parameters, updates):
    stride = path_stride(parameters, "float32", updates)
    size = path_dtype(parameters, "float32").itemsize
    assert (updates // stride + 2) * size <= PATH_LIMIT_BYTES and stride & (stride - 1) == 0
    assert stride == 1 or (updates // (stride // 2) + 2) * size > PATH_LIMIT_BYTES


@pytest.mark.parametrize("parameters", [1, 2, 65, 2410, 100_000, 5_000_000])
def test_a_path_whose_end_is_not_known_is_whole_at_first_and_stays_within_its_limit(parameters, tmp_path, monkeypatch):
    writer = PathWriter(tmp_path, parameters, "float32", None)
    kept = []
    monkeypatch.setattr(writer, "_add", lambda version, _x: kept.append(version))
    while writer._next <= MOST_UPDATES:
        writer.append(writer._next, None)
    stage, gaps = path_stage(parameters, "float32"), np.diff(kept)
    assert kept[:stage] == list(range(min(stage, len(kept))))
    assert (np.diff(gaps) >= 0).all() and all(gap & (gap - 1) == 0 for gap in set(gaps.tolist()))
    assert (len(kept) + 1) * path_dtype(parameters, "float32").itemsize <= PATH_LIMIT_BYTES
    assert MOST_UPDATES == MAX_UPDATES


def test_a_thinned_path_keeps_the_start_and_the_last_version(tmp_path):
    writer = PathWriter(tmp_path, 20_000, "float64", 1000)
    assert writer.stride == 4
    for version in range(11):
        writer.append(version, np.full(20_000, version))
    writer.finish(10, np.full(20_000, 10))
    trace = Trace(tmp_path)
    assert list(trace.path_versions) == [0, 4, 8, 10] and list(trace.path[:, -1]) == [0, 4, 8, 10]


def test_exports_hold_every_push_and_the_experiment(folder, tmp_path_factory):
    from pyarrow import parquet

    record(folder)
    trace, out = Trace(folder), tmp_path_factory.mktemp("out")
    table = parquet.read_table(trace.to_parquet(out / "run.parquet"))
    assert table.to_pandas().equals(trace.to_pandas()) and len(table) == 10
    assert gd.Experiment.from_json(table.schema.metadata[b"gdlab.experiment"]) == trace.experiment
    assert len(trace.to_csv(out / "run.csv").read_text().splitlines()) == 11
    copy = gd.open_trace(trace.save(out / "copy"))
    assert copy.pushes.tobytes() == trace.pushes.tobytes() and copy.experiment == trace.experiment
    with pytest.raises(TraceError, match="exists already"):
        trace.save(out / "copy")


@pytest.mark.parametrize("content", [None, "", "{", '{"experiment": {"workers": 0}}', "{}", '{"experiment": 3}'])
def test_a_folder_that_holds_no_run_is_refused_in_one_sentence(tmp_path, content):
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(TraceError) as caught:
        gd.open_trace(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_missing_folder_is_refused_and_run_json_is_replaced_whole(tmp_path):
    with pytest.raises(TraceError, match="no run at"):
        gd.open_trace(tmp_path / "nope")
    write_run(tmp_path, {"ended": None})
    write_run(tmp_path, {"ended": {"how": "done"}})
    assert read_run(tmp_path)["ended"]["how"] == "done" and [file.name for file in tmp_path.iterdir()] == ["run.json"]


def test_a_strangers_function_is_never_taken_from_a_folder(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "boom"),)

    payload, folder = cloudpickle.dumps(Bomb()), tmp_path / "theirs"
    problem = {"kind": "Opaque", "name": "f", "payload_sha256": hashlib.sha256(payload).hexdigest()}
    folder.mkdir()
    (folder / "payload.bin").write_bytes(payload)
    write_run(folder, {"experiment": {"problem": problem}})
    found = gd.open_trace(folder).experiment
    for experiment in (found, found.replace(workers=1), gd.Experiment.from_json(found.to_json())):
        assert experiment.payload is None
        with pytest.raises(gd.ExperimentError, match=r"give it again with exp\.replace\(problem=\.\.\.\)\.$"):
            gd.launch(experiment, folder=tmp_path / "ours")
    assert not (tmp_path / "boom").exists() and not (tmp_path / "ours").exists()


def test_a_run_of_this_session_keeps_its_function(tmp_path):
    made = gd.Experiment(problem=lambda: None)
    write_run(tmp_path, {"experiment": json.loads(made.to_json())})
    (tmp_path / "payload.bin").write_bytes(made.payload)
    own = Trace(tmp_path, made.payload).experiment
    assert own.payload == own.replace(workers=1).payload == experiment_of(tmp_path).payload == made.payload
