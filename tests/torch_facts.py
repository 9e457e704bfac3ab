"""Ask torch.distributed itself, on real ranks forked by a fresh process: python torch_facts.py WORLD QUESTION."""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel


def reduced(rank: int, world: int) -> list[float]:
    """Sum 1 and many 2^-24 in fp32: where an element lies decides in which order it is added."""
    x = torch.full((1000,), 1.0 if rank == 0 else 2.0**-24)
    dist.all_reduce(x)
    return x.tolist()


def joined(rank: int, world: int) -> dict[str, list[float]]:
    """Give rank 0 one gradient (2) and rank 1 two (4, 8), under DDP's join with and without its default."""
    seen = {}
    for name, initial in (("initial", True), ("effective", False)):
        model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        gradients = []
        with Join([model], divide_by_initial_world_size=initial):
            for value in ([2.0], [4.0, 8.0])[rank]:
                model.zero_grad()
                model(torch.tensor([[value]])).sum().backward()
                gradients.append(model.module.weight.grad.item())
        seen[name] = gradients
    return seen


def main(rank: int, world: int, question: str, store: str, answers: multiprocessing.Queue) -> None:
    """Be one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world,
                            timeout=timedelta(seconds=60))
    answers.put((rank, {"reduced": reduced, "joined": joined}[question](rank, world)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    size, asked = int(sys.argv[1]), sys.argv[2]
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        queue = fork.Queue()
        ranks = [fork.Process(target=main, args=(rank, size, asked, f"{folder}/store", queue)) for rank in range(size)]
        for process in ranks:
            process.start()
        print(json.dumps([answer for _, answer in sorted((queue.get(timeout=90) for _ in ranks), key=lambda a: a[0])]))
        for process in ranks:
            process.join()
