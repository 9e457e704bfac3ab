"""The helper process: load torch, answer one line of JSON with another, leave when the asking end is closed."""

from __future__ import annotations

import importlib
import json
import os
import select
import sys

IDLE_S = float(os.environ.get("GDLAB_ZYGOTE_IDLE_S", "inf"))
"""After how many seconds without a question the process leaves, to free its memory."""
ANSWERS = {"record": "engine", "jvp": "engine", "along": "engine", "costs": "engine", "run": "traps"}
"""Each question -> the module whose function of that name answers it."""


def main() -> None:
    """Serve until nobody can ask any more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what torch might print is no answer
    import torch

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    wait_s = None if IDLE_S == float("inf") else IDLE_S
    while select.select([sys.stdin], [], [], wait_s)[0] and (line := sys.stdin.readline()):
        asked = json.loads(line)
        try:
            module = importlib.import_module(f"gdlab.autodiff.{ANSWERS[asked['ask']]}")
            answer = {"answer": getattr(module, asked["ask"])(**asked["given"])}
        except Exception as error:  # the process goes on, and whoever asked is told
            answer = {"error": str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
