"""The bytes in the trace are those on the socket, are drawn, and are missed where a trace is older than they."""

from __future__ import annotations

import json
import shutil
import struct
import sys
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest
from made_traces import SIMULATED, made
from processes import PATIENCE_S

import gdlab as gd
from gdlab import views
from gdlab.backends import launcher
from gdlab.backends.messages import _HEADER
from gdlab.backends.topology import Topology, topology_of
from gdlab.backends.virtual import simulate
from gdlab.records import OLD_KINDS, PUSH, RECORD, RECORD_WITHOUT_BYTES
from gdlab.trace import Follower, Trace
from gdlab.views.bytes_sent import sent_by_version

METHODS = (None, "bf16", "fp8", "sign", "topk")
FRAME = 4 + _HEADER.size
"""Each message to or from the server: the length that a connection puts in front, and the header."""


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ranks of this test's runs count what their sockets carry."""

    def topology(experiment: gd.Experiment, backend: str) -> Topology:
        real = topology_of(experiment, backend)
        for process in real.processes:
            if process["role"] == "rank":
                process["target"] = "counting_roles:rank"
        return real

    monkeypatch.setattr(launcher, "topology_of", topology)


def counted(trace: Trace) -> list[dict[str, int]]:
    return [json.loads((trace.folder / f"counted-{rank}.json").read_text()) for rank in range(trace.experiment.workers)]


@pytest.mark.parametrize("method", METHODS)
def test_bytes_counted_are_the_bytes_on_the_servers_sockets(method: str | None, counting: None) -> None:
    trace = gd.run(gd.Experiment(gd.Digits("logistic"), workers=2, updates=10, strategy=gd.Sync(exchange="server"),
                                 compression=method))
    for rank, on_socket in enumerate(counted(trace)):
        rows = trace.pushes[trace.pushes["worker"] == rank]
        assert on_socket["messages_sent"] == on_socket["messages_read"] == 11  # ready or stop, too
        assert on_socket["sent"] - 11 * FRAME == rows["bytes_sent"].sum() > 0
        assert on_socket["read"] - 11 * FRAME == rows["bytes_read"].sum() == 10 * 4 * 650
    assert trace.summary()["bytes"] == trace.pushes["bytes_sent"].sum()
    assert trace.summary()["bytes_read"] == 2 * 10 * 4 * 650


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own count of a socket's bytes is Linux's")
@pytest.mark.parametrize("method", METHODS)
def test_bytes_counted_are_the_bytes_that_the_kernel_sent_between_ranks(method: str | None, counting: None) -> None:
    # gloo frames each of its messages (here by 288 bytes in all), which two sizes of a push do not differ in, and
    # begins with some messages, which two lengths of a run do not differ in. What is left: a header more or less, 24
    # bytes a rank and update.
    sizes, lengths = (300, 3000), (5, 25)
    runs = {(size, length): gd.launch(gd.Experiment(gd.Quadratic((1.0,) * size, (1.0,) * size), workers=3,
                                                    updates=length, compression=method, optimizer=gd.SGD(0.01)))
            for size in sizes for length in lengths}
    traces = {key: run.wait(PATIENCE_S) for key, run in runs.items()}
    if any(found["tcp"] is None for trace in traces.values() for found in counted(trace)):
        pytest.skip("this kernel does not count a socket's bytes")
    sent = {key: sum(found["tcp"] for found in counted(trace)) for key, trace in traces.items()}
    an_update = [(sent[size, lengths[1]] - sent[size, lengths[0]]) / (lengths[1] - lengths[0]) for size in sizes]
    told = [traces[size, lengths[1]].summary()["bytes"] / lengths[1] for size in sizes]
    assert an_update[1] - an_update[0] == pytest.approx(told[1] - told[0], abs=3 * 24)
    messages = 3 * 2 * (2 if method in (None, "bf16") else 1)  # of all ranks: 2 (N - 1) each in a ring, or N - 1
    assert 0 < (an_update[0] - told[0]) / messages < 400


# ---- what a trace says -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("strategy", [gd.Sync(exchange="server"), gd.Async(), gd.Sync(), gd.LocalSGD(2)],
                         ids=["server", "Async", "all-reduce", "LocalSGD"])
def test_every_push_says_what_was_sent_for_it_and_a_lone_worker_sends_nothing(strategy: object, tmp_path: Path) -> None:
    exp = gd.Experiment(gd.Digits("logistic"), strategy=strategy, updates=12, compute_time=gd.Exponential(0.05))
    trace = simulate(exp, tmp_path / "four")
    over_server = strategy in (gd.Sync(exchange="server"), gd.Async())
    assert set(trace.applied["bytes_sent"]) == {650 * 4 if over_server else 650 * 4 * 1.5}
    assert set(trace.pushes["bytes_read"]) == {650 * 4 if over_server else 0}
    assert trace.to_pandas()["bytes_sent"].sum() == trace.summary()["bytes"] == trace.pushes["bytes_sent"].sum()
    alone = simulate(exp.replace(workers=1), tmp_path / "one").summary()
    assert alone["bytes"] == alone["bytes_read"] == 0


def test_a_cancelled_step_sent_nothing(tmp_path: Path) -> None:
    rows = simulate(gd.Experiment(gd.Quadratic(), strategy=gd.Sync(1, "server"), updates=5,
                                  compute_time=gd.Exponential(0.05)), tmp_path / "run").pushes
    assert set(rows["bytes_sent"][rows["version"] < 0]) == {0} and set(rows["bytes_sent"]) == {0, 8}


def in_the_old_format(folder: Path, copy: Path) -> Path:
    """Write a run again as it was written before bytes were counted."""
    shutil.copytree(folder, copy)
    for file in copy.glob("events-*.bin"):
        rows = np.fromfile(file, RECORD)
        old_kind = {new: old for old, new in OLD_KINDS.items()}
        file.write_bytes(b"".join(struct.pack("<ii4q7dq2d", old_kind[row[0]], *row[1:-2]) for row in rows.tolist()))
    return copy


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Trace]:
    """Give a run and the same in the format of the time before."""
    folder = tmp_path_factory.mktemp("old")
    exp = gd.Experiment(gd.Ravine(), workers=2, strategy=gd.Async(), updates=40)
    made(folder / "new", exp, 40, environment=SIMULATED)
    return Trace(folder / "new"), gd.open_trace(in_the_old_format(folder / "new", folder / "old"))


def test_a_trace_of_the_time_before_bytes_opens_and_says_all_that_it_said(old: tuple[Trace, Trace]) -> None:
    new, before = old
    assert struct.calcsize("<ii4q7dq2d") == RECORD_WITHOUT_BYTES.itemsize == RECORD.itemsize - 16
    assert before.pushes.dtype == PUSH and len(before.pushes) == 40 and before.impossible == before.torn == 0
    for name in RECORD_WITHOUT_BYTES.names[1:]:
        assert np.array_equal(before.pushes[name], new.pushes[name], equal_nan=True), name
    assert np.isnan(before.pushes["bytes_sent"]).all() and np.isnan(before.summary()["bytes"])
    assert np.isnan(before.to_pandas()["bytes_read"]).all()


def test_a_trace_of_the_time_before_bytes_is_followed_and_its_torn_tail_is_dropped(old: tuple[Trace, Trace],
                                                                                  tmp_path: Path) -> None:
    data = (old[1].folder / "events-server.bin").read_bytes()
    follower, seen = Follower(tmp_path), []
    with open(tmp_path / "events-server.bin", "wb", buffering=0) as file:
        for start in range(0, len(data), 97):
            file.write(data[start : start + 97])
            seen.extend(follower.read().pushes["version"])
    assert seen == list(range(1, 41)) and Trace(tmp_path).torn == 0
    with open(tmp_path / "events-server.bin", "ab") as file:
        file.write(b"torn")
    assert Trace(tmp_path).torn == 1 and len(Trace(tmp_path).pushes) == 40


# ---- the figure ------------------------------------------------------------------------------------------------------

def caption(fig: go.Figure) -> str:
    return fig.layout.title.subtitle.text.replace("<br>", " ")


def test_the_figure_adds_up_what_was_sent_and_puts_the_loss_over_it() -> None:
    exp = gd.Experiment(gd.Digits("logistic"), updates=30, strategy=gd.Sync(exchange="server"))
    traces = [gd.run(exp.replace(compression=spec), backend="virtual") for spec in (None, "topk")]
    fig = gd.views.bytes_sent(*traces)
    total, loss, less, loss_less = fig.data
    assert total.y[-1] == traces[0].summary()["bytes"] == 30 * 4 * 2600 and less.y[-1] == 30 * 4 * 48
    assert total.x[-1] == less.x[-1] == 30
    assert loss.x[-1] == total.y[-1] and loss.y[-1] == pytest.approx(traces[0].losses[-1])
    assert loss_less.x[0] == 4 * 48 and loss_less.y[0] == pytest.approx(traces[1].losses[1])
    said = fig.layout.meta["description"]
    assert "no compression: 312 kB in 30 updates, 10.4 kB an update" in said and "top-k 1%: 5.76 kB" in said
    assert "The server sent 312 kB of parameters back." in caption(gd.views.bytes_sent(traces[1]))


def test_the_figure_says_where_there_is_nothing_to_draw(old: tuple[Trace, Trace], tmp_path: Path) -> None:
    said = [note.text.replace("<br>", " ") for note in gd.views.bytes_sent(old[1]).layout.annotations]
    assert said == ["This trace does not say how many bytes were sent."]
    alone = gd.views.bytes_sent(simulate(gd.Experiment(gd.Quadratic(), workers=1, updates=5), tmp_path / "run"))
    assert "one worker alone sends nothing" in alone.layout.annotations[0].text.replace("<br>", " ")
    assert gd.views.bytes_sent().layout.annotations[0].name == "message"
    both = gd.views.bytes_sent(gd.run(gd.Experiment(gd.Ravine(), updates=5), backend="virtual"), old[1])
    assert len(both.data) == 2 and "does not say how many bytes" in caption(both)


def test_a_push_that_was_dropped_counts_to_the_round_that_left_it_out() -> None:
    rows = np.zeros(4, PUSH)
    rows["version"], rows["read_version"], rows["bytes_sent"] = [1, -1, 2, -1], [0, 0, 1, 2], [8, 4, 8, 2]
    assert sent_by_version(rows).tolist() == [0, 12, 22]
    assert sent_by_version(rows[:0]).tolist() == [0]


def test_every_view_draws_a_trace_of_the_time_before_bytes(old: tuple[Trace, Trace]) -> None:
    for view in views.VIEWS.values():
        assert view(old[1]).to_json()
