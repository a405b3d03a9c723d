"""Simulates real training with honest miners of three efforts and one miner of each attack: who earns what.

    python scripts/simulate_attackers.py [--windows 30] [--efforts 8 24 64] [--seeds 0 1 2 ... 7] [--single-bytes]

Prints a table over all seeds and writes it to ``docs/attackers.md``. The exit status is 1 if with any seed an attacker
earns as much as an honest miner, honest miners are not paid in the order of effort, or the loss is more than 2 % above
that of a run without attackers. The seed selects the sampled pages. Each seed takes two to three minutes of one core.
With ``--single-bytes`` a token is a byte of the corpus instead of a pair, and the table is only printed.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tplr.hparams import load_hparams
from tplr.localnet.attackers import Honest, everybody
from tplr.localnet.plan import PROFILE
from tplr.localnet.simulation import SINGLE_BYTES, VOCABULARY, Member, WindowRecord, World, small

TABLE = Path(__file__).parents[1] / "docs" / "attackers.md"
PEERS = 8
MOST_LOSS = 1.02


@dataclass(frozen=True)
class Outcome:
    """Results of one seed, by miner: weight, factors, windows gathered, rules that struck it."""

    seed: int
    names: list[str]
    weights: list[float]
    gains: list[float]
    binaries: list[float]
    gathered: list[int]
    struck: list[set[str]]
    loss: float
    without: float

    @classmethod
    def of(cls, world: World, *, without: float) -> "Outcome":
        """``without``: the held-out loss of a run without attackers."""
        kept, records = world.board.peer_scores, world.records
        return cls(
            seed=world.seed,
            names=[member.name for member in world.by_uid.values()],
            weights=[world.board.weights.get(uid, 0.0) for uid in world.by_uid],
            gains=[kept[uid].gain for uid in world.by_uid],
            binaries=[kept[uid].binary for uid in world.by_uid],
            gathered=[sum(uid in record.peers for record in records) for uid in world.by_uid],
            struck=[{code for one in records for code in one.outcome.struck.get(uid, ())} for uid in world.by_uid],
            loss=world.held_out_loss(),
            without=without,
        )

    def checks(self, honest: int) -> dict[str, bool]:
        """The conditions, and whether they hold. The first ``honest`` miners are honest, by ascending effort."""
        good, cheats = self.weights[:honest], self.weights[honest:]
        return {
            "every cheat below every honest miner": max(cheats) < min(good),
            "honest by effort": good == sorted(good) and len(set(good)) == len(good),
            "loss within 2 %": self.loss <= MOST_LOSS * self.without,
        }


def live(members: list[Member], windows: int, seed: int, vocabulary: int) -> World:
    """Simulate ``windows`` windows of a network of ``members``."""
    hparams = small(load_hparams(PROFILE), vocabulary=vocabulary, max_topk_peers=PEERS)
    world = World(hparams, members, seed=seed)

    def show(record: WindowRecord) -> None:
        print(f"seed {seed}, window {record.window}: loss {record.loss:.4f}, peers {list(record.peers)}", flush=True)

    asyncio.run(world.run(windows, on_window=show))
    return world


def table(outcomes: Sequence[Outcome], honest: int) -> list[str]:
    """Lines of Markdown: a row for each miner, and one for each seed."""
    head = ["miner", *(f"seed {one.seed}" for one in outcomes), "weight", "gain", "binary", "gathered", "struck by"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for i, name in enumerate(outcomes[0].names):
        shares = [100 * one.weights[i] for one in outcomes]
        cells = [
            name,
            *(f"{share:.2f} %" for share in shares),
            f"{min(shares):.2f} to {max(shares):.2f} %",
            spread([one.gains[i] for one in outcomes]),
            spread([one.binaries[i] for one in outcomes]),
            f"{min(one.gathered[i] for one in outcomes)} to {max(one.gathered[i] for one in outcomes)}",
            ", ".join(sorted(set().union(*(one.struck[i] for one in outcomes)))) or "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    head = ["seed", "loss", "without cheats", "ratio", "least honest over best cheat", *outcomes[0].checks(honest)]
    lines += ["", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for one in outcomes:
        best = max(one.weights[honest:])
        cells = [
            f"{one.seed}",
            f"{one.loss:.4f}",
            f"{one.without:.4f}",
            f"{one.loss / one.without:.4f}",
            f"{min(one.weights[:honest]) / best:.1f}" if best else "no cheat earns",
            *("yes" if good else "NO" for good in one.checks(honest).values()),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def spread(values: Sequence[float]) -> str:
    """Minimum and maximum."""
    return f"{min(values):+.2f} to {max(values):+.2f}"


def write(lines: Sequence[str]) -> None:
    """Replace the table in the docs; the text around it stays."""
    before, _, rest = TABLE.read_text().partition("<!-- table -->\n")
    _, end, after = rest.partition("<!-- end -->\n")
    TABLE.write_text(f"{before}<!-- table -->\n" + "\n".join(lines) + f"\n{end}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=30)
    parser.add_argument("--efforts", type=int, nargs="+", default=[8, 24, 64], help="sequences trained on in a window")
    parser.add_argument("--seeds", type=int, nargs="+", default=[*range(8)])
    parser.add_argument("--single-bytes", action="store_true", help="a token for each byte of the corpus")
    given = parser.parse_args()
    torch.set_num_threads(1)  # far faster than more on so small a model
    efforts, outcomes = tuple(sorted(given.efforts)), []
    vocabulary = SINGLE_BYTES if given.single_bytes else VOCABULARY
    for seed in given.seeds:
        world = live(everybody(efforts, victim=len(efforts)), given.windows, seed, vocabulary)
        alone = live([Honest(effort) for effort in efforts], given.windows, seed, vocabulary)
        outcomes.append(Outcome.of(world, without=alone.held_out_loss()))
    lines = table(outcomes, len(efforts))
    print("\n".join(lines))
    if not given.single_bytes:
        write(lines)
    return 0 if all(all(one.checks(len(efforts)).values()) for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
