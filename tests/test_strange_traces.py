"""A folder from anybody opens as a trace or is refused in one sentence; what no run can have written is left out."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_traces import SIMULATED, made

import gdlab as gd
from gdlab import views
from gdlab.following import Follower
from gdlab.reading import MOST_STEPS, ascending
from gdlab.records import KIND_PUSH, KIND_RELEASE, PUSH, RECORD
from gdlab.trace import Trace, TraceError, write_surface

EVENTS = "events-server.bin"
MEMBERS = ("pushes", "applied", "path", "path_versions", "path_seconds", "losses", "surface", "updates", "exponents",
           "environment", "ended", "local_path", "torn", "impossible")
DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "run"
    made(folder, gd.Experiment(gd.Ravine(), workers=2, strategy=gd.Async()), updates=20, environment=SIMULATED)
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "run"))


def look(folder: Path) -> Trace | None:
    """Open a folder and look at all that is in it; None where it is refused in one sentence."""
    try:
        trace = gd.open_trace(folder)
    except TraceError as error:
        assert "\n" not in str(error) and str(error).endswith(".")
        return None
    for name in MEMBERS:
        getattr(trace, name)
    trace.summary()
    trace.to_pandas()
    Follower(folder).read()
    for view in views.VIEWS.values():
        view(trace)
    return trace


def in_run(**changes: Any) -> Callable[[dict], dict]:
    return lambda run: run | changes


@pytest.mark.parametrize("text", ["[]", "null", '"a"', "3", DEEP, "\xff\xfe", '{"experiment": []}', "{}",
                                  '{"experiment": {"self": 1}}', '{"experiment": ' + DEEP])
def test_what_is_no_run_is_refused_in_one_sentence(folder: Path, text: str) -> None:
    (folder / "run.json").write_text(text, encoding="latin-1")
    assert look(folder) is None


@pytest.mark.parametrize("value", [None, [], "a", 3, {"clock": [1]}, {"clock": "wall", "ranks": "<b>x", "cores": 2},
                                   {"clock": "wall", "ranks": 4, "cores": {}, "threads": None, "note": [[]]},
                                   {"clock": {"a": {"b": 1}}}, {"versions": {"python": "3"}}])
def test_a_machine_that_cannot_be_is_no_machine(folder: Path, value: Any) -> None:
    run = json.loads((folder / "run.json").read_text())
    for changes in ({"environment": value}, {"ended": value}):
        (folder / "run.json").write_text(json.dumps(run | changes))
        trace = look(folder)
        assert trace is not None and isinstance(trace.environment, dict) and not isinstance(trace.ended, list | str)


@pytest.mark.parametrize("text", [
    "{}", "[]", "null", DEEP, "", *(json.dumps({"parameters": size, "dtype": dtype}) for size, dtype in (
        (-1, "float32"), (0, "float32"), (10**12, "float32"), (2.5, "float32"), ("a", "float32"), (True, "float32"),
        (2, "O"), (2, "V8"), (2, ["f4"]), (2, None)))])
@pytest.mark.parametrize("name", ["path", "local-0"])
def test_a_path_of_no_shape_is_refused_in_one_sentence(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.json").write_text(text)
    (folder / f"{name}.bin").touch()
    assert look(folder) is None


@pytest.mark.parametrize("data", [b"", b"x" * 4096, b"\xff" * 4096, bytes(4096), bytes(range(256)) * 64])
@pytest.mark.parametrize("name", [EVENTS, "events-x.bin", "path.bin", "losses.bin", "exponents-server.bin",
                                  "updates.bin", "surface-001.npz", "local-abc.bin", "local-0.bin", "final.json"])
def test_a_file_of_rubbish_spoils_nothing(folder: Path, name: str, data: bytes) -> None:
    if name == "local-0.bin":
        shutil.copy(folder / "path.json", folder / "local-0.json")
    (folder / name).write_bytes(data)
    assert look(folder) is not None


@pytest.mark.parametrize("text", ["[]", DEEP, '{"final_loss": "x", "accuracy": []}', '{"final_loss": null}'])
def test_a_final_loss_that_is_no_number_is_none(folder: Path, text: str) -> None:
    (folder / "final.json").write_text(text)
    trace = look(folder)
    assert trace is not None and isinstance(trace.summary()["final_loss"], float)


@pytest.mark.parametrize(("field", "value"), [
    ("version", 2**62), ("version", 10**9), ("version", -5), ("worker", -7), ("worker", 2), ("worker", 2**31 - 1),
    ("step", 2**62), ("step", -1), ("staleness", 2**62), ("staleness", 10**9), ("staleness", -3), ("read_version", -2),
    ("applied_s", np.inf), ("start_s", -1e308), ("released_s", 1e12), ("computed_s", -np.inf)])
def test_a_push_that_cannot_be_is_left_out_and_counted(folder: Path, field: str, value: float) -> None:
    rows = np.fromfile(folder / EVENTS, RECORD)
    at = np.flatnonzero(rows["kind"] == KIND_PUSH)[5]
    rows[field][at] = value
    rows.tofile(folder / EVENTS)
    trace = look(folder)
    assert trace is not None and trace.impossible == 1 and len(trace.pushes) == 19
    assert len(Follower(folder).read().pushes) == 19


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), share=st.floats(0, 1))
def test_whatever_bytes_events_hold_what_is_left_is_possible(folder: Path, seed: int, share: float) -> None:
    draws = np.random.default_rng(seed)
    rows = np.zeros(50, RECORD)
    raw = rows.view("u1").reshape(50, -1)
    raw[:] = np.where(draws.random(raw.shape) < share, draws.integers(0, 256, raw.shape), raw)
    rows["kind"] = draws.integers(0, 6, 50)
    rows.tofile(folder / EVENTS)
    trace = Trace(folder)
    pushes = trace.pushes
    assert pushes.dtype == PUSH and ((pushes["worker"] >= 0) & (pushes["worker"] < 2)).all()
    assert (pushes["staleness"] >= 0).all() and (pushes["version"] <= 100_000).all()
    assert trace.impossible >= (~np.isin(rows["kind"], (KIND_PUSH, KIND_RELEASE))).sum()
    assert trace.path_seconds.shape == trace.path_versions.shape


@given(st.lists(st.integers(-3, 12) | st.sampled_from([2**62, MOST_STEPS])), st.integers(-1, 5))
def test_versions_only_grow(versions: list[int], last: int) -> None:
    rows = np.zeros(len(versions), [("version", "i8")])
    rows["version"] = versions
    expected, newest = [], last
    for version in versions:
        if version > newest and version < MOST_STEPS:
            expected.append(version)
        newest = max(newest, version)
    assert list(ascending(rows, last)["version"]) == expected


def test_a_directory_or_a_device_is_no_file_of_a_run(folder: Path) -> None:
    (folder / "events-x.bin").mkdir()
    (folder / "surface-900.npz").mkdir()
    os.symlink("/dev/zero", folder / "events-y.bin")
    trace = look(folder)
    assert trace is not None and len(trace.pushes) == 20


@pytest.mark.parametrize("arrays", [
    {}, {"x": np.array([{}], object)}, {"x": np.arange(3), "kind": "parameters"},
    {"x": np.arange(3), "y": np.arange(2), "loss": np.zeros((3, 2)), "kind": "parameters"},
    {"x": np.arange(3), "y": np.arange(2), "loss": np.zeros((2, 3)), "kind": "flat"},
    {"x": np.arange(3), "y": np.arange(2), "loss": np.zeros((2, 3)), "kind": "pca"},
    {"x": np.array(["a"]), "y": np.arange(2), "loss": np.zeros((2, 1)), "kind": "parameters"},
    {"x": np.arange(0), "y": np.arange(0), "loss": np.zeros((0, 0)), "kind": "parameters"}])
def test_a_surface_that_cannot_be_drawn_is_none(folder: Path, arrays: dict[str, Any]) -> None:
    np.savez(folder / "surface-007.npz", **arrays)
    trace = look(folder)
    assert trace is not None and trace.surface is None


def test_a_surface_that_unpacks_to_very_much_is_not_unpacked(folder: Path) -> None:
    with zipfile.ZipFile(folder / "surface-007.npz", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("x.npy", bytes(80 * 2**20))
    assert Trace(folder).surface is None


def test_the_newest_surface_is_the_one_with_the_highest_number(folder: Path) -> None:
    follower, grid = Follower(folder), {"y": np.arange(2.0), "loss": np.zeros((2, 2)), "kind": "parameters"}
    for index in (5, 999, 1000, 1001, 10_000):
        write_surface(folder, index, x=np.array([0.0, index]), **grid)
        assert Trace(folder).surface["x"][1] == follower.read().surface["x"][1] == index
