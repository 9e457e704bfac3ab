"""Measure from the click to the first update with 4 local ranks: gdlab's warm launch beside torch.multiprocessing.

Both build the same problem, meet over gloo on this machine, and apply one synchronous update. The two take turns in one
run, so that whatever else the machine does falls on both. Prints both medians and their ratio.

    python benchmarks/launch_latency.py [--rounds 5] [--ranks 4] [--exchange allreduce]
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import tempfile
import time

import gdlab as gd


def spawned_rank(rank: int, ranks: int, port: int, text: str, answers) -> None:
    """Do in a fresh interpreter what one of gdlab's ranks does up to its first update."""
    import torch
    import torch.distributed as dist

    from gdlab.descent.problems import build
    from gdlab.descent.store import Store
    from gdlab.descent.worker import Worker

    torch.set_num_threads(1)
    experiment = gd.Experiment.from_json(text)
    problem = build(experiment)
    store, worker = Store(experiment, problem), Worker(experiment, problem, rank)
    meeting = dist.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=ranks)
    total = store.contribution(worker.gradient(store.read(rank), 0)).clone()
    dist.all_reduce(total)
    store.apply_sum(total, False, ranks)
    answers.put(time.monotonic())
    dist.barrier()
    dist.destroy_process_group()


def by_spawn(experiment: gd.Experiment) -> float:
    """Return the seconds from the call to the first update through torch.multiprocessing spawn."""
    import torch.multiprocessing as mp

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    answers = mp.get_context("spawn").SimpleQueue()
    began = time.monotonic()
    mp.spawn(spawned_rank, (experiment.workers, port, experiment.to_json(), answers), nprocs=experiment.workers)
    return min(answers.get() for _ in range(experiment.workers)) - began


def by_gdlab(experiment: gd.Experiment) -> float:
    """Return the seconds from gd.launch to the first update."""
    began = time.monotonic()
    run = gd.launch(experiment)
    trace = run.wait()
    return float(trace.applied["applied_s"].min()) + run.shared.t0 - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--exchange", choices=("allreduce", "server"), default="allreduce")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    experiment = gd.Experiment(workers=options.ranks, updates=1, strategy=gd.Sync(exchange=options.exchange))

    import torch.multiprocessing  # noqa: F401 - loaded beforehand, as the zygote is

    from gdlab.backends import warm

    warm(None)
    by_gdlab(experiment)
    ours, theirs = [], []
    for number in range(options.rounds):
        ours += [by_gdlab(experiment), by_gdlab(experiment)]
        theirs.append(by_spawn(experiment))
        print(f"round {number + 1}: gdlab {ours[-2] * 1e3:.0f} and {ours[-1] * 1e3:.0f} ms, "
              f"spawn {theirs[-1] * 1e3:.0f} ms", flush=True)
    mine, other = statistics.median(ours), statistics.median(theirs)
    print(f"{options.ranks} ranks, click to first update, medians: "
          f"gdlab {mine * 1e3:.0f} ms (best {min(ours) * 1e3:.0f}), "
          f"torch.multiprocessing spawn {other * 1e3:.0f} ms (best {min(theirs) * 1e3:.0f}): "
          f"1/{other / mine:.1f} (best against best 1/{min(theirs) / min(ours):.1f}), load {os.getloadavg()[0]:.1f} "
          f"on {len(os.sched_getaffinity(0))} cores")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="gdlab-latency-", ignore_cleanup_errors=True) as folder:
        os.environ["GDLAB_RUNS"] = folder
        main()
