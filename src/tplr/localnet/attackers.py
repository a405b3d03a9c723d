"""Miners of a simulation: honest ones that train on different amounts of data, and one of each known attack."""

from collections.abc import Callable, Iterator

import numpy as np
import torch

from tplr.compress.payload import Coefficients, Update, build
from tplr.localnet.simulation import Member, World
from tplr.seeds import derive


class Honest(Member):
    """Trains on the first ``effort`` sequences of its pages, and sends its update in time."""

    def __init__(self, effort: int) -> None:
        self.effort = effort
        self.name = f"honest, {effort} sequences"

    def batches(self, world: World, window: int) -> np.ndarray:
        """The batches it trains on."""
        return self._share(world.pages(self.uid, window).batches)

    def _share(self, batches: np.ndarray) -> np.ndarray:
        sequences = batches.reshape(-1, batches.shape[-1])[: self.effort]
        return sequences.reshape(-1, min(self.effort, batches.shape[1]), batches.shape[-1])

    def train(self, world: World, batches: np.ndarray) -> dict[str, torch.Tensor]:
        """Local training from its weights; tensors by name."""
        now = world.train_state
        return now.local.run(self.train_state.model, batches, step=now.global_step).tensors

    def tensors(self, world: World, window: int) -> dict[str, torch.Tensor]:
        """The tensors it packs."""
        return self.train(world, self.batches(world, window))

    def body(self, world: World, window: int) -> bytes | None:
        """The bytes it sends, or None."""
        return self.outer.pack(
            self.tensors(world, window),
            step=world.train_state.global_step,
            window=window,
            uid=self.uid,
            pages_digest=world.pages(self.uid, window).digest,
            batches=self.effort,
        )

    def update(self, world: World, window: int) -> Update:
        """Its update as others decode it. Raises PayloadError if it is invalid."""
        return world.parse(self.body(world, window) or b"", window, self.uid)

    async def act(self, world: World, window: int) -> None:
        """Commit before the window's end, and send after it."""
        body = self.body(world, window)
        if body is not None:
            await self.publish(world, window, body)


class Cheat(Honest):
    """An honest miner with one change; subclasses say which."""

    def __init__(self, name: str, effort: int) -> None:
        super().__init__(effort)
        self.name = name
        self.honest = False


class Changed(Cheat):
    """Sends changed tensors."""

    def __init__(self, name: str, effort: int, change: Callable[[torch.Tensor, torch.Generator], torch.Tensor]) -> None:
        super().__init__(name, effort)
        self._change = change

    def tensors(self, world: World, window: int) -> dict[str, torch.Tensor]:
        """The honest tensors, changed."""
        random = torch.Generator().manual_seed(derive("changed", self.uid, window) >> 1)
        return {name: self._change(one, random) for name, one in super().tensors(world, window).items()}


class Copier(Cheat):
    """Sends another miner's update as its own, one second after the original was committed.

    In a network with commits it could not read the update by then. Here it can, to test that the copy is detected.
    """

    committed, sent = -4.0, 3.0

    def __init__(self, name: str, victim: int, *, noise: float = 0.0, own_indices: float = 0.0) -> None:
        super().__init__(name, 0)
        self._victim = victim
        self._noise = noise
        self._own_indices = own_indices

    def body(self, world: World, window: int) -> bytes | None:
        """The victim's coefficients, with noise."""
        stolen = world.updates[self._victim]
        random = np.random.default_rng(derive("copier", self.uid, window))
        kept = {}
        for name, tensor in stolen.spec.tensors.items():
            indices, values = stolen.coefficients(name)
            values = values * torch.from_numpy(np.exp(self._noise * random.standard_normal(values.shape))).float()
            if self._own_indices and not tensor.dense:
                indices, values = _replace_some(indices, values, tensor.grid.entries, self._own_indices, random)
            kept[name] = indices, values
        return readdress(kept, stolen, world, self, window)


class Repeater(Cheat):
    """Trains once, and sends that update in every window."""

    def __init__(self, name: str, effort: int) -> None:
        super().__init__(name, effort)
        self._first: Update | None = None

    def body(self, world: World, window: int) -> bytes | None:
        """The first update with this window's header."""
        if self._first is None:
            body = super().body(world, window)
            assert body is not None
            self._first = world.parse(body, window, self.uid)
            return body
        kept = {name: self._first.coefficients(name) for name in self._first.spec.tensors}
        return readdress(kept, self._first, world, self, window)


class Overfitter(Cheat):
    """Overfits one batch of its pages: best on its own pages, of little use on others."""

    steps, rate = 40, 2e-3

    def tensors(self, world: World, window: int) -> dict[str, torch.Tensor]:
        """Weights before many steps on one batch, minus those after."""
        model = self.train_state.model
        before = {name: one.detach().clone() for name, one in model.named_parameters()}
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.rate, weight_decay=0.0)
        one_batch = self.batches(world, window)[:1]
        for _ in range(self.steps):
            for name, gradient in self.train(world, one_batch).items():
                model.get_parameter(name).grad = gradient
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            change = {name: before[name] - one for name, one in model.named_parameters()}
            for name, one in model.named_parameters():
                one.copy_(before[name])
        return {name: one.detach() for name, one in change.items()}


class WrongPages(Cheat):
    """Trains on pages of its own choice, and names those that it was assigned."""

    def batches(self, world: World, window: int) -> np.ndarray:
        """Pages that no miner was assigned."""
        return self._share(world.pages_of_seed(derive("elsewhere", window)).batches)


class HalfAbsent(Cheat):
    """Sends an update in every second window only."""

    def body(self, world: World, window: int) -> bytes | None:
        """An honest update, or None."""
        return super().body(world, window) if window % 2 else None


class OutOfSync(Cheat):
    """Applies only its own updates, and so trains another model."""

    own_model = True

    async def act(self, world: World, window: int) -> None:
        """Publish as an honest miner, then take a step of its own."""
        body = self.body(world, window)
        assert body is not None
        await self.publish(world, window, body)
        self.train_state.apply([world.parse(body, window, self.uid)])


class Late(Cheat):
    """Sends a second after the time bound."""

    def join(self, world: World, uid: int) -> None:
        """Join the network; its updates come late."""
        super().join(world, uid)
        self.sent = world.hparams.time_window_delta_seconds + 1.0


class Malformed(Cheat):
    """Sends a malformed update, in another of 20 ways in each window."""

    def body(self, world: World, window: int) -> bytes | None:
        """An honest update, damaged."""
        body = super().body(world, window)
        assert body is not None
        ways = list(malformed(body, world, self.uid, window))
        return ways[window % len(ways)]


def malformed(body: bytes, world: World, uid: int, window: int) -> Iterator[bytes]:
    """20 malformed variants of an update."""
    spec = world.spec
    start, tensor = spec.data_start, next(one for one in spec.tensors.values() if not one.dense)
    random = np.random.default_rng(window).bytes(len(body))
    nan, infinite, huge = (np.float32(x).tobytes() for x in (np.nan, np.inf, 3e38))

    def patched(where: int, what: bytes) -> bytes:
        return body[:where] + what + body[where + len(what) :]

    yield b""  # empty
    yield body[:-1]  # a byte short
    yield body + b"\0"  # a byte more
    yield body[: len(body) // 2]  # half of it
    yield random  # noise of the right length
    yield b"\0" * len(body)  # zeros of the right length
    yield patched(0, (2**40).to_bytes(8, "little"))  # a header of a terabyte
    yield patched(0, (0).to_bytes(8, "little"))  # no header
    yield patched(8, b"\x80\x04")  # a pickle's first bytes
    yield patched(8, b"[" * 64)  # JSON nested deep
    yield body.replace(b'"outer":"demo"', b'"outer":"omed"')  # another scheme
    yield body.replace(f'"window":"{window:016d}"'.encode(), f'"window":"{window + 1:016d}"'.encode())
    yield body.replace(f'"uid":"{uid:05d}"'.encode(), f'"uid":"{uid + 1:05d}"'.encode())
    yield patched(start, nan)
    yield patched(start, infinite)
    yield patched(start, huge)
    yield patched(tensor.indices.start, b"\xff" * (tensor.indices.stop - tensor.indices.start))  # too many indices
    yield patched(tensor.indices.start, b"\0" * (tensor.indices.stop - tensor.indices.start))  # too few indices
    yield body[:start] + random[start:]  # a true header, noise below it
    yield patched(start - 2, b"!!")  # a header that is no JSON


def readdress(kept: dict[str, Coefficients], update: Update, world: World, sender: Member, window: int) -> bytes:
    """Build an update of ``sender`` in ``window`` from the coefficients of another update."""
    return build(
        kept,
        update.spec,
        window=window,
        uid=sender.uid,
        pages_digest=world.pages(sender.uid, window).digest,
        batches=update.batches,
    )


def _replace_some(
    indices: torch.Tensor, values: torch.Tensor, entries: int, share: float, random: np.random.Generator
) -> Coefficients:
    """Replace ``share`` of each row's coordinates by random ones, with values from the same row."""
    rows = []
    for found, kept_values in zip(indices.tolist(), values.tolist(), strict=True):
        row = dict(zip(found, kept_values, strict=True))
        for index in random.choice(found, size=round(share * len(found)), replace=False).tolist():
            del row[index]
        while len(row) < len(found):
            row.setdefault(int(random.integers(entries)), float(random.choice(kept_values)))
        rows.append(sorted(row.items()))
    pairs = torch.tensor(rows, dtype=torch.float64)
    return pairs[..., 0].long(), pairs[..., 1].float()


def everybody(efforts: tuple[int, ...], victim: int) -> list[Member]:
    """Honest miners of these efforts, and one miner of each attack; copiers copy uid ``victim``."""
    usual = sorted(efforts)[-2]
    return [
        *(Honest(effort) for effort in efforts),
        Changed("random values", usual, lambda one, random: torch.randn(one.shape, generator=random)),
        Changed("zeros", usual, lambda one, _: torch.zeros_like(one)),
        Changed("signs flipped", usual, lambda one, _: -one),
        Changed("scaled by 1e6", usual, lambda one, _: 1e6 * one),
        Copier("copier", victim),
        Copier("copier with noise", victim, noise=0.5),
        Copier("copier, 30 % own indices", victim, own_indices=0.3),
        Repeater("stale repeater", usual),
        Overfitter("overfitter", usual),
        WrongPages("wrong pages", usual),
        HalfAbsent("absent every second window", usual),
        OutOfSync("out of sync", usual),
        Malformed("malformed in 20 ways", usual),
        Late("late by one second", usual),
    ]
