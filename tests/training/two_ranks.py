"""One of two ranks of a miner, started by ``test_sharded.py``: ``python two_ranks.py HPARAMS...``; rank 0 prints JSON.

Faults are scripted at (rank, window): while moments are put together, in the middle of a forward pass, of a backward
pass, with weights that are not there when they are sent, before losses are added up, after the last collective, and
death.
"""

import itertools
import json
import os
import sys
import time

import numpy as np
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from tplr.compress.payload import parse
from tplr.errors import TrainingError
from tplr.hparams import HParams, load_hparams
from tplr.training import inner
from tplr.training.fingerprint import digest
from tplr.training.local import LocalWork, TrainStats
from tplr.training.model import build_model
from tplr.training.schemes import local_training, outer_scheme
from tplr.training.sharded import ProcessGroupContext, ShardedTraining, joined_process_group, serve

torch.set_num_threads(1)
FAULTS = {2: (1, "keeping"), 4: (1, "forward"), 5: (0, "backward"), 6: (1, "backward")}
FAULTS |= {7: (0, "sending"), 8: (1, "counting"), 9: (1, "end"), 11: (1, "death")}
window = -1
real_forward = LlamaMLP.forward


def goes_wrong(place: str) -> bool:
    """Whether it is here that this rank fails in this window."""
    return FAULTS.get(window) == (int(os.environ["RANK"]), place)


def broken(*_: object) -> None:
    raise ValueError("scripted")


def forward(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
    """The first layer's work may go wrong; the collectives of later layers are still to come."""
    out = real_forward(self, x)
    if goes_wrong("death"):
        os._exit(9)
    if goes_wrong("forward"):
        broken()
    if goes_wrong("backward"):
        out.register_hook(broken)
    return out


def finished(tensors: dict[str, torch.Tensor], train_stats: TrainStats) -> LocalWork:
    """What training returns; all ranks have made their last collective."""
    if goes_wrong("end"):
        broken()
    return LocalWork(tensors, train_stats)


def watch(ranks: ProcessGroupContext) -> None:
    """Let the fault script know the window, which comes to rank 1 with the order, and of what is sent."""
    wait, send = ranks.receive_task, ranks.send_task
    send_part, put_together, add_up = ranks.distribute, ranks.full_tensor, ranks.sum
    thirds = itertools.cycle((False, False, True))

    def waited() -> tuple[int, np.ndarray]:
        global window
        window, batches = wait()
        return window, batches

    def sent(step: int, batches: np.ndarray) -> None:
        global window
        window = step
        send(step, batches)

    def part(whole: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        return send_part(None if goes_wrong("sending") else whole, like)

    def whole(part: torch.Tensor) -> torch.Tensor:
        if goes_wrong("keeping") and next(thirds):
            broken()
        return put_together(part)

    def total(number: float) -> float:
        if goes_wrong("counting"):
            broken()
        return add_up(number)

    ranks.receive_task, ranks.send_task, ranks.distribute, ranks.full_tensor, ranks.sum = (
        waited,
        sent,
        part,
        whole,
        total,
    )


def compare(hparams: HParams, ranks: ProcessGroupContext, windows: range) -> list[dict]:
    """Each window by both ranks and by one process: how far apart work and updates are, or what failed."""
    model = build_model(hparams)
    parameters = dict(model.named_parameters())
    both = ShardedTraining(local_training(parameters, hparams), hparams, ranks)
    alone = local_training(parameters, hparams)
    outers = [outer_scheme(parameters, hparams) for _ in range(2)]
    before, found = digest(parameters), []
    for step in windows:
        batches = np.random.default_rng(step).integers(0, hparams.model.vocab_size, (5, 2, 12))
        began = time.monotonic()
        try:
            work = both.run(model, batches, step=step)
        except (TrainingError, RuntimeError) as error:
            found.append({"failed": type(error).__name__, "seconds": time.monotonic() - began})
            alone.load_state_dict(both.state_dict())  # whole, however far the window came
            continue
        expected = alone.run(model, batches, step=step)
        bodies = [
            outer.pack(
                one.tensors, step=step, window=step, uid=1, pages_digest="0" * 64, batches=one.train_stats.batches
            )
            for outer, one in zip(outers, (work, expected), strict=True)
        ]
        updates = [parse(body, outers[0].spec, window=step, uid=1) for body in bodies]
        decoded = [
            torch.cat([update.coefficients(name)[1].flatten() for name in sorted(parameters)]) for update in updates
        ]
        flat = [torch.cat([one.tensors[name].flatten() for name in sorted(parameters)]) for one in (work, expected)]
        found.append(
            {
                "tally": vars(work.train_stats) | {"losses": round(work.train_stats.losses, 4)},
                "expected": vars(expected.train_stats) | {"losses": round(expected.train_stats.losses, 4)},
                "work_apart": ((flat[0] - flat[1]).norm() / flat[1].norm()).item(),
                "update_apart": ((decoded[0] - decoded[1]).norm() / decoded[1].norm()).item(),
                "bytes_apart": sum(a != b for a, b in zip(*bodies, strict=True)) / len(bodies[0]),
                "weights_untouched": digest(parameters) == before,
            }
        )
    return found


def main() -> None:
    LlamaMLP.forward, inner.LocalWork = forward, finished
    results = {}
    demo, sparseloco = (load_hparams(path) for path in sys.argv[1:])
    with joined_process_group(torch.device("cpu")) as ranks:
        watch(ranks)
        for hparams, windows in ((demo, range(2)), (sparseloco, range(2, max(FAULTS) + 1))):
            if ranks.rank == 0:
                results[hparams.outer] = compare(hparams, ranks, windows)
                if hparams is demo:
                    ranks.send_task(-1, np.empty((0, 0, 0), np.int64))
            else:
                serve(ranks, hparams)
        if ranks.rank == 0:
            sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
