"""The grids of ``convergence.py``: sizes, trials of rates, and the cells that are compared."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

TUNING_SEED = 100
GROUPED = "muon-grouped"


@dataclass(frozen=True)
class Grid:
    """Sizes of a grid; a round is ``inner_steps`` batches on each peer."""

    hidden: int
    layers: int
    vocab: int
    sequence: int
    batch: int
    peers: int
    inner_steps: int
    rounds: int
    demo_batches: int  # of each peer in one of DeMo's windows
    seeds: int
    sparse: tuple[tuple[int, int], ...]  # (k of 4096, bits; 0 for float32)
    muon_sparse: tuple[tuple[int, int], ...]  # the same, of ``muon-sparseloco``
    muon_grouped: tuple[tuple[int, int], ...] = ((128, 1),)  # the same, of ``muon-grouped``
    tuned: str = ""  # the grid whose best rates serve methods without trials here; "": all have trials here
    # By method, what is tried here instead of TRIALS; a single one needs no trial.
    rates: Mapping[str, Sequence[Mapping[str, float]]] = field(default_factory=dict)
    heads: int = 4

    @property
    def steps(self) -> int:
        """Of AdamW; DeMo makes one for ``demo_batches`` of them."""
        return self.rounds * self.inner_steps

    @property
    def model(self) -> dict[str, int]:
        """Shape of the model, by names of hparams."""
        return {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": 3 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
        }


# Six for each method: peak learning rates, and what else its authors tune.
TRIALS: dict[str, list[dict[str, float]]] = {
    "adamw": [{"lr": lr} for lr in (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)],
    "diloco": [{"lr": lr, "outer": outer} for lr in (4e-3, 8e-3) for outer in (0.1, 0.2, 0.3)],
    "sparseloco": [{"lr": lr, "outer": outer, "decay": 0.95} for lr in (4e-3, 8e-3) for outer in (0.7, 1.0, 1.4)],
    "averaging": [{"lr": lr, "outer": outer} for lr in (4e-3, 8e-3) for outer in (0.7, 1.0, 1.4)],
    "demo": [{"lr": lr, "decay": decay} for lr in (1e-3, 2e-3, 4e-3) for decay in (0.9, 0.99)],
    "muon-sparseloco": [
        {"lr": 1.6e-2, "outer": 1.0, "decay": 0.95, "momentum": 0.95} | change
        for change in ({}, {"lr": 8e-3}, {"lr": 3.2e-2}, {"outer": 1.4}, {"decay": 0.99}, {"momentum": 0.9})
    ],
    "muon-averaging": [{"lr": lr, "outer": outer} for lr in (8e-3, 1.6e-2) for outer in (0.7, 1.0, 1.4)],
    "muon": [{"lr": lr} for lr in (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)],
}
Points = tuple[tuple[int, float], ...]  # outer steps and the outer rates there, after the first rate
# With expected weights, as the default.
EXPECTED = {"lr": 1.6e-2, "outer": 2.0, "decay": 0.95, "momentum": 0.9, "expected": 0.1}
TRIALS[GROUPED] = [
    *TRIALS["muon-sparseloco"],
    *(EXPECTED | {"outer": outer, "expected": share} for outer, share in ((1.4, 0.25), (2.0, 0.25), (2.8, 0.25))),
    EXPECTED,
]
GRIDS = {
    "reduced": Grid(
        hidden=64, layers=2, vocab=1024, sequence=64, batch=8, peers=4,
        inner_steps=10, rounds=64, demo_batches=2, seeds=3,
        sparse=((64, 2), (256, 1), (256, 2), (256, 0), (88, 1)),
        muon_sparse=((88, 1), (256, 1), (128, 1), (64, 1)),
    ),
    "full": Grid(
        hidden=128, layers=2, vocab=1024, sequence=64, batch=8, peers=8,
        inner_steps=15, rounds=130, demo_batches=3, seeds=4,
        sparse=tuple((k, bits) for k in (32, 64, 128, 256) for bits in (1, 2, 4, 0)),
        muon_sparse=tuple((k, bits) for k in (32, 64, 88, 128, 256) for bits in (1, 2)),
    ),
}  # fmt: skip
# Twice and four times the batch, and the tokens; nothing else changes. The averages have the rates of 4 peers.
GRIDS["reduced-8"] = replace(
    GRIDS["reduced"],
    peers=8,
    sparse=((256, 1),),
    muon_sparse=((256, 1),),
    tuned="reduced",
    rates={
        "adamw": TRIALS["adamw"],
        "diloco": TRIALS["diloco"],
        GROUPED: [*TRIALS[GROUPED], *(EXPECTED | {"outer": outer} for outer in (2.8, 4.0))],
        "muon": [{"lr": lr} for lr in (8e-3, 1.6e-2)],
        "sparseloco": [
            {"lr": lr, "outer": outer, "decay": 0.95}
            for lr, outer in ((8e-3, 1.0), (8e-3, 1.4), (8e-3, 2.0), (4e-3, 2.0), (8e-3, 2.8), (8e-3, 4.0))
        ],
        "muon-sparseloco": [
            {"lr": 1.6e-2, "outer": outer, "decay": 0.95, "momentum": 0.9} for outer in (1.0, 1.4, 2.0, 2.8)
        ],
        "demo": [{"lr": lr, "decay": 0.99} for lr in (4e-3, 2e-3, 8e-3)],
    },
)
GRIDS["reduced-16"] = replace(
    GRIDS["reduced-8"],
    peers=16,
    tuned="reduced-8",
    rates={
        "adamw": [{"lr": lr} for lr in (8e-3, 1.6e-2, 4e-3)],
        "diloco": [{"lr": lr, "outer": outer} for lr, outer in ((4e-3, 0.2), (4e-3, 0.3), (8e-3, 0.2))],
        GROUPED: [
            *({"lr": 1.6e-2, "outer": outer, "decay": 0.95, "momentum": 0.9} for outer in (1.4, 2.0)),
            *(EXPECTED | {"outer": outer} for outer in (2.0, 2.8, 4.0, 5.6)),
        ],
        "muon": [{"lr": lr} for lr in (1.6e-2, 3.2e-2, 6.4e-2)],
        "sparseloco": [{"lr": 8e-3, "outer": outer, "decay": 0.95} for outer in (2.0, 2.8, 4.0)],
        "muon-sparseloco": [
            {"lr": 1.6e-2, "outer": outer, "decay": 0.95, "momentum": 0.9} for outer in (2.0, 2.8, 4.0)
        ],
        "demo": [{"lr": lr, "decay": 0.99} for lr in (4e-3, 8e-3)],
    },
)
# The best outer rate of many peers in a long run: 500 short rounds of a smaller model, in which a peer sends each entry
# 16 times.
GRIDS["long-16"] = replace(
    GRIDS["reduced-16"],
    tuned="reduced-16",
    layers=1,
    batch=4,
    inner_steps=5,
    rounds=500,
    rates={
        GROUPED: [*(EXPECTED | {"outer": outer} for outer in (1.0, 2.0, 4.0)), EXPECTED | {"outer": 1.4, "decay": 0.98}]
    },
)
# The same with 4 peers; the baselines have trials of their own.
GRIDS["long-4"] = replace(
    GRIDS["long-16"],
    peers=4,
    sparse=(),
    muon_sparse=(),
    tuned="",
    rates={
        "adamw": [{"lr": lr} for lr in (2e-3, 4e-3, 8e-3)],
        "diloco": [{"lr": lr, "outer": outer} for lr, outer in ((4e-3, 0.2), (4e-3, 0.4), (4e-3, 0.7), (2e-3, 0.4))],
        "muon-averaging": [{"lr": lr, "outer": 1.0} for lr in (8e-3, 1.6e-2)],
        GROUPED: [EXPECTED | change for change in ({"outer": 2.0}, {"outer": 1.0}, {"lr": 8e-3})]
        + [EXPECTED | {"outer": outer, "decay": 0.98} for outer in (1.0, 1.4, 2.0)]
        + [EXPECTED | {"decay": 0.99}, EXPECTED | {"decay": 0.98, "points": ((200, 1.4),)}],
    },
)


def default_with(name: str, **rates: float | Points) -> Grid:
    """Return a grid in which the default has the rates of ``EXPECTED`` but for the given ones, without trials."""
    return replace(GRIDS[name], tuned="", sparse=(), muon_sparse=(), rates={GROUPED: [EXPECTED | rates]})


# The default with one outer rate for every number of peers, as hparams files have one.
GRIDS |= {
    f"outer-{rate}-{name}": default_with(of, outer=float(rate))
    for name, of in {"4": "reduced", "8": "reduced-8", "16": "reduced-16", "long-16": "long-16"}.items()
    for rate in (1, 2)
}
# The default with the rates of ``hparams.json``; 64 rounds end before the outer rate falls.
SHORT: Mapping[str, float | Points] = {"decay": 0.98}
SHIPPED = {**SHORT, "points": ((64, 2.0), (128, 1.4))}
GRIDS |= {
    f"shipped-{name}": default_with(of, **SHORT)
    for name, of in {"4": "reduced", "8": "reduced-8", "16": "reduced-16"}.items()
} | {"shipped-long-4": default_with("long-4", **SHIPPED)}
# Groups of 64 entries, for updates of half the size: what 70B parameters need on home lines.
GRIDS |= {f"outer-{rate}-k-64": replace(GRIDS[f"outer-{rate}-4"], muon_grouped=((64, 1),)) for rate in (1, 2)}
# The full grid's model, peers and tokens in hours instead of a day. Methods have a few trials around the rates found
# for the reduced one: SparseLoCo and DeMo from half of its inner rates on, as half is best for AdamW and the default
# here. The other methods have its rates.
GRIDS["larger"] = replace(
    GRIDS["full"],
    seeds=3,
    sparse=((256, 1),),
    muon_sparse=((88, 1), (256, 1)),
    tuned="reduced-8",
    rates={
        "adamw": [{"lr": lr} for lr in (8e-3, 4e-3, 2e-3)],
        "muon": [{"lr": lr} for lr in (1.6e-2, 8e-3)],
        "sparseloco": [{"lr": 4e-3, "outer": outer, "decay": 0.95} for outer in (1.0, 1.4, 2.0, 2.8, 4.0)],
        "demo": [{"lr": lr, "decay": 0.99} for lr in (2e-3, 4e-3, 1e-3)],
        "diloco": [
            {"lr": lr, "outer": outer}
            for lr, outer in ((4e-3, 0.2), (4e-3, 0.3), (4e-3, 0.4), (4e-3, 0.6), (2e-3, 0.3))
        ],
        "muon-grouped": [
            {"lr": lr, "outer": outer, "decay": 0.95, "momentum": 0.9}
            for lr, outer in ((1.6e-2, 1.4), (1.6e-2, 1.0), (8e-3, 1.4), (8e-3, 2.0), (8e-3, 2.8), (4e-3, 2.0))
        ]
        + [
            {"lr": 8e-3, "outer": outer, "decay": decay, "momentum": 0.9, "expected": share}
            for outer, decay, share in ((2.8, 0.95, 0.25), (4.0, 0.95, 0.25), (2.8, 0.98, 0.25), (2.8, 0.95, 0.1))
        ]
        + [
            EXPECTED | {"lr": 8e-3, "outer": 2.8} | change
            for change in ({"outer": 4.0}, {"outer": 2.0}, {"momentum": 0.95}, {"lr": 6e-3}, {"lr": 4e-3})
        ],
    },
)
# The default with the rates of the localnet and of ``hparams.json``, and the larger model's own learning rate.
GRIDS["outer-2-larger"] = default_with("larger", lr=6e-3)
GRIDS["shipped-larger"] = default_with("larger", lr=6e-3, **SHIPPED)
# The default with an outer rate that rises until a short run's end; and one that rises as early in a long run.
RISING = {"outer": 1.0, "points": ((64, 4.0),)}
GRIDS |= {
    "rising-4": default_with("reduced", **RISING),
    "rising-8": default_with("reduced-8", **RISING),
    "rising-16": default_with("reduced-16", **RISING),
    "rising-long-16": default_with("long-16", outer=1.5, points=((64, 3.2), (500, 1.5))),
}
# The default with the best rates found in the trials, and the present norm caps.
GRIDS |= {
    "tuned-4": default_with("reduced", expected=0.25),
    "tuned-8": default_with("reduced-8", outer=2.8),
    "tuned-16": default_with("reduced-16", outer=4.0),
    "tuned-larger": default_with("larger", lr=6e-3, outer=2.8),
}
# Other inner rates for the outer rate of the localnet.
GRIDS["inner-8"] = replace(
    GRIDS["outer-2-8"], rates={GROUPED: [EXPECTED | {"lr": lr} for lr in (1.2e-2, 1.6e-2, 2.4e-2)]}
)
# Half as many exchanges of updates twice as large, for the same tokens.
GRIDS["reduced-20-steps"] = replace(
    GRIDS["reduced"], inner_steps=20, rounds=32, sparse=(), muon_sparse=((200, 1),), tuned="reduced"
)
# For a GPU: 117M parameters, 200M tokens of text that is found on the machine (``--text``). No trials: the methods'
# published rates at this size. Muon's steps have AdamW's RMS, so both have the same inner rate.
PUBLISHED = {"lr": 1e-3}
GRIDS["gpu"] = Grid(
    hidden=768, layers=12, heads=12, vocab=16384, sequence=512, batch=16, peers=4,
    inner_steps=10, rounds=611, demo_batches=2, seeds=3,
    sparse=((256, 2),), muon_sparse=((256, 1),),
    rates={
        "adamw": [PUBLISHED],
        "muon": [PUBLISHED],
        "diloco": [PUBLISHED | {"outer": 0.7}],
        "averaging": [PUBLISHED | {"outer": 1.0}],
        "muon-averaging": [PUBLISHED | {"outer": 1.0}],
        "sparseloco": [PUBLISHED | {"outer": 1.0, "decay": 0.95}],
        "muon-sparseloco": [PUBLISHED | {"outer": 1.0, "decay": 0.95, "momentum": 0.9}],
        "muon-grouped": [PUBLISHED | {"outer": 2.0, "decay": 0.95, "momentum": 0.9, "expected": 0.1}],
        "demo": [{"lr": 1e-3, "decay": 0.999}],
    },
)  # fmt: skip
# The same model and text within minutes of a GPU: a sixth of the tokens, one seed, and outer rates of the small grids.
GRIDS["gpu-short"] = replace(
    GRIDS["gpu"],
    rounds=104,
    seeds=1,
    rates={
        "adamw": [PUBLISHED],
        "muon": [PUBLISHED],
        "diloco": [PUBLISHED | {"outer": 0.3}],
        GROUPED: [PUBLISHED | {"outer": 2.0, "decay": 0.95, "momentum": 0.9, "expected": 0.1}],
    },
)
# Other rates of the baselines, one run each: lr-2 has twice the inner rate.
GRIDS |= {
    "gpu-short-lr-2": replace(
        GRIDS["gpu-short"], rates={"adamw": [{"lr": 2e-3}], "diloco": [{"lr": 2e-3, "outer": 0.3}]}
    ),
    "gpu-short-lr-0.5": replace(
        GRIDS["gpu-short"], rates={"adamw": [{"lr": 5e-4}], "diloco": [{"lr": 5e-4, "outer": 0.3}]}
    ),
    "gpu-short-outer-0.7": replace(GRIDS["gpu-short"], rates={"diloco": [PUBLISHED | {"outer": 0.7}]}),
    "gpu-short-outer-0.1": replace(GRIDS["gpu-short"], rates={"diloco": [PUBLISHED | {"outer": 0.1}]}),
}
# SparseLoCo's rates are found there and used for all its cells.
TUNED_AT = {"sparseloco": (256, 2), "muon-sparseloco": (96, 1), GROUPED: (128, 1)}

METHODS = [*TRIALS]
DENSE = ("adamw", "muon", "diloco", "averaging", "muon-averaging")  # methods that send float32


@dataclass(frozen=True)
class Cell:
    """One training; all but ``purpose`` identifies it."""

    grid: str
    purpose: str  # tune or final
    method: str
    k: int
    bits: int
    settings: str  # JSON of one of TRIALS
    seed: int


def trials(name: str) -> list[Cell]:
    """All cells by which learning rates are found."""
    places, grid = TUNED_AT | {"demo": (64, 2)}, GRIDS[name]
    borrowed = trials(grid.tuned) if grid.tuned else []
    return borrowed + [
        Cell(name, "tune", method, *places.get(method, (0, 0)), json.dumps(settings), TUNING_SEED)
        for method, all_settings in _tried(grid).items()
        for settings in all_settings
    ]


def _tried(grid: Grid) -> Mapping[str, Sequence[Mapping[str, float]]]:
    """The settings that are compared on this grid, by method."""
    if grid.rates or grid.tuned:
        return {method: several for method, several in grid.rates.items() if len(several) > 1}
    return TRIALS


def finals(name: str, best: Mapping[str, str]) -> list[Cell]:
    """All cells that are compared, seed by seed, so that a stopped grid is one with fewer seeds."""
    dense = [(method, 0, 0) for method in DENSE]
    sparse = [(method, *at) for method, every in sparse_places(GRIDS[name]).items() for at in every]
    return [
        Cell(name, "final", method, k, bits, best[method], seed)
        for seed in range(GRIDS[name].seeds)
        for method, k, bits in (*dense, ("demo", 64, 2), *sparse)
        if method in best
    ]


def sparse_places(grid: Grid) -> dict[str, tuple[tuple[int, int], ...]]:
    return {"sparseloco": grid.sparse, "muon-sparseloco": grid.muon_sparse, GROUPED: grid.muon_grouped}


def best_settings(rows: Sequence[Mapping[str, str]], name: str) -> dict[str, str]:
    """Return each method's settings: of its best trial on this grid, or as the grid says; others are left out."""
    borrowed = best_settings(rows, GRIDS[name].tuned) if GRIDS[name].tuned else {}
    borrowed |= {method: json.dumps(rates[0]) for method, rates in GRIDS[name].rates.items() if len(rates) == 1}
    tuned: dict[str, list[Mapping[str, str]]] = {}
    for row in rows:
        if row["grid"] == name and row["purpose"] == "tune":
            tuned.setdefault(row["method"], []).append(row)
    return borrowed | {
        method: min(tuned[method], key=lambda row: float(row["loss"]))["settings"]
        for method in TRIALS
        if method in tuned
    }


def best_finals(rows: Sequence[Mapping[str, str]], name: str) -> list[Mapping[str, str]]:
    """Return the rows of a grid's final cells, without those of settings that later trials have beaten."""
    best = best_settings(rows, name)
    found = [row for row in rows if (row["grid"], row["purpose"]) == (name, "final")]
    return [row for row in found if row["settings"] == best.get(row["method"], row["settings"])]
