"""Thirty windows of real training with honest miners of three efforts and one of every cheat, and what each earns.

    python scripts/simulate_attackers.py [--windows 30] [--efforts 8 24 64]

Prints the table and writes it to ``docs/attackers.md``; exit status 1 if a cheat earns as much as an honest miner, the
honest are not ordered by effort, or the loss is more than 2 % from that of a run without cheats. Takes some minutes.
"""

import argparse
import asyncio
import sys
from pathlib import Path

import torch

from tplr.hparams import load_hparams
from tplr.localnet.attackers import Honest, everybody
from tplr.localnet.plan import PROFILE
from tplr.localnet.simulation import Member, WindowRecord, World, small

TABLE = Path(__file__).parents[1] / "docs" / "attackers.md"
PEERS = 8
MOST_LOSS = 1.02


def live(members: list[Member], windows: int) -> World:
    world = World(small(load_hparams(PROFILE), max_topk_peers=PEERS), members)

    def say(record: WindowRecord) -> None:
        print(f"window {record.window}: loss {record.loss:.4f}, peers {list(record.peers)}", flush=True)

    asyncio.run(world.run(windows, say=say))
    return world


def row(world: World, uid: int) -> str:
    standing, struck = (
        world.board.standings[uid],
        sorted({c for r in world.records for c in r.outcome.struck.get(uid, ())}),
    )
    gathered = sum(uid in record.peers for record in world.records)
    cells = [
        world.by_uid[uid].name,
        f"{100 * world.board.weights.get(uid, 0.0):.2f} %",
        f"{standing.final:.3f}",
        f"{standing.mu - 3 * standing.sigma:+.1f}",
        f"{standing.binary:+.3f}",
        f"{standing.sync:.1f}",
        f"{gathered}",
        ", ".join(struck) or "-",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=30)
    parser.add_argument("--efforts", type=int, nargs="+", default=[8, 24, 64], help="sequences trained on in a window")
    given = parser.parse_args()
    torch.set_num_threads(1)  # far faster than more on so small a model
    efforts = tuple(sorted(given.efforts))
    world = live(everybody(efforts, victim=len(efforts)), given.windows)
    alone = live([Honest(effort) for effort in efforts], given.windows)

    weights = [world.board.weights.get(uid, 0.0) for uid in world.by_uid]
    honest, cheats = weights[: len(efforts)], weights[len(efforts) :]
    loss, without = world.held_out_loss(), alone.held_out_loss()
    verdicts = {
        "every cheat earns less than every honest miner": max(cheats) < min(honest),
        "honest miners are ordered by effort": honest == sorted(honest) and len(set(honest)) == len(honest),
        f"loss {loss:.4f}, without cheats {without:.4f}: within 2 %": loss <= MOST_LOSS * without,
    }
    head = [
        "miner",
        "weight",
        "final",
        "ordinal",
        "binary",
        "sync",
        f"windows gathered of {given.windows}",
        "struck by",
    ]
    lines = [
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(row(world, uid) for uid in world.by_uid),
        "",
        *(f"- {text}: {'yes' if good else 'NO'}" for text, good in verdicts.items()),
    ]
    print("\n".join(lines))
    TABLE.write_text(
        f"# What cheats earn\n\nAfter {given.windows} windows of `scripts/simulate_attackers.py`; columns as in "
        "[scoring.md](scoring.md).\n\n" + "\n".join(lines) + "\n"
    )
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
