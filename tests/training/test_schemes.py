"""Both schemes as nodes run them: the same bytes for any order of updates, and across restarts."""

import pytest
import torch

from tplr.compress import chunks
from tplr.compress.dct import inverse
from tplr.compress.payload import parse
from tplr.training.fingerprint import digest
from tplr.training.model import build_model
from tplr.training.schedule import learning_rate
from tplr.training.schemes import local_training, outer_scheme

MINERS = 3
SMALL = {"sparseloco": {"inner_steps": 2, "outer_momentum": 0.5, "outer_nesterov": True}, "demo": {}}


class Node:
    """A model with both halves of its scheme."""

    def __init__(self, hparams):
        self.hparams = hparams
        self.model = build_model(hparams)
        self.parameters = dict(self.model.named_parameters())
        self.local = local_training(self.parameters, hparams)
        self.outer = outer_scheme(self.parameters, hparams)

    def update(self, uid, step, batches) -> bytes:
        work = self.local.run(self.model, batches, step=step)
        return self.outer.pack(
            work.tensors, step=step, window=step, uid=uid, pages_digest="0" * 64, batches=work.train_stats.batches
        )

    def apply(self, bodies, step, order) -> None:
        updates = [parse(body, self.outer.spec, window=step, uid=uid) for uid, body in enumerate(bodies)]
        self.outer.apply(order(updates), step=step)

    def restarted(self) -> "Node":
        """Return a new process with the saved state of this one."""
        other = Node(self.hparams)
        with torch.no_grad():
            for name, parameter in other.parameters.items():
                parameter.copy_(self.parameters[name])
        other.local.load_state_dict(self.local.state_dict())
        other.outer.load_state_dict(self.outer.state_dict())
        return other


@pytest.mark.parametrize(
    ("steps", "miner_restarts", "watcher_restarts"),
    [(8, (3, 4, 7), 5), pytest.param(20, (7, 8, 15), 12, marks=pytest.mark.long)],
)
@pytest.mark.parametrize("scheme", [pytest.param("demo", marks=pytest.mark.long), "sparseloco"])
def test_steps_leave_all_nodes_with_the_same_bytes(scheme, steps, miner_restarts, watcher_restarts, tiny, batches):
    hparams = tiny(scheme, layers=1, **SMALL[scheme])
    miners, watcher = [Node(hparams) for _ in range(MINERS)], Node(hparams)
    begin = digest(watcher.parameters)
    unbroken = Node(hparams)  # the first miner again, which is never restarted
    for step in range(steps):
        if step in miner_restarts:
            miners[0] = miners[0].restarted()
        if step == watcher_restarts:
            watcher = watcher.restarted()
        own = [batches(100 * step + uid, 2) for uid in range(MINERS)]
        bodies = [miner.update(uid, step, own[uid]) for uid, miner in enumerate(miners)]
        assert unbroken.update(0, step, own[0]) == bodies[0]
        for node in miners:
            node.apply(bodies, step, list)
        for node in (watcher, unbroken):
            node.apply(bodies, step, lambda updates: updates[::-1])
        assert len({digest(node.parameters) for node in (*miners, watcher, unbroken)}) == 1, step
    assert digest(watcher.parameters) != begin


@pytest.mark.parametrize("scheme", ["demo", "sparseloco"])
def test_what_was_packed_and_restored_is_sent_later(scheme, tiny, batches):
    hparams = tiny(scheme, quantization_bits=0, **SMALL[scheme])
    node = Node(hparams)
    body = node.update(4, 0, batches())
    left = {name: tensor.norm() for name, tensor in node.outer.state_dict()["tensors"].items()}
    node.outer.restore(body, window=0, uid=4)
    whole = node.outer.state_dict()["tensors"]
    # Dense tensors had nothing left; all of it is restored.
    assert all(whole[name].norm() > left[name] for name in left if not name.startswith("shared."))
    node.outer.own_applied(0)  # it was applied after all
    assert node.outer.state_dict()["window"] is None


@pytest.mark.parametrize("scheme", ["demo", "sparseloco"])
def test_packing_and_fifteen_peers_take_less_memory_than_two_tensors(scheme, tiny, live, monkeypatch):
    """In addition to parameters, error feedback and packed bytes. A row block is a sixteenth of the largest tensor, a
    larger share than in a large model."""
    monkeypatch.setitem(chunks.ROW_BLOCK_ENTRIES, "cpu", 2**16)
    parameters = {"w": torch.zeros(1024, 1024), "v": torch.zeros(512, 1024), "norm": torch.zeros(1024)}
    outer = outer_scheme(parameters, tiny(scheme, target_chunk=64, topk_compression=32, **SMALL[scheme]))
    chance = torch.Generator().manual_seed(1)
    work = {name: torch.randn(one.shape, generator=chance) for name, one in parameters.items()}

    def packed(uid: int) -> bytes:
        return outer.pack(work, step=0, window=0, uid=uid, pages_digest="0" * 64, batches=1)

    updates = [parse(packed(uid), outer.spec, window=0, uid=uid) for uid in range(15)]
    outer.apply(updates, step=0)
    with live() as packing:
        packed(0)
    with live() as applying:
        outer.apply(updates, step=1)
    for most in (packing.most, applying.most):
        assert parameters["w"].nbytes / 16 < most <= 2 * parameters["w"].nbytes


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("scheme", "selection"), [("demo", "chunk"), ("sparseloco", "chunk"), ("sparseloco", "group")])
def test_a_gpu_keeps_what_its_bytes_do_not_say(scheme, selection, tiny):
    hparams = tiny(scheme, topk_selection=selection, **SMALL[scheme])
    chance = torch.Generator().manual_seed(1)
    work = {name: torch.randn(shape, generator=chance) for name, shape in (("w", (48, 32)), ("norm", (16,)))}
    outer = outer_scheme({name: torch.zeros_like(one, device="cuda") for name, one in work.items()}, hparams)
    on_gpu = {name: one.cuda() for name, one in work.items()}
    body = outer.pack(on_gpu, step=0, window=0, uid=0, pages_digest="0" * 64, batches=1)
    update, left = parse(body, outer.spec, window=0, uid=0), outer.state_dict()["tensors"]
    for name, tensor in outer.spec.tensors.items():
        indices, values = update.coefficients(name)
        sent = torch.zeros(tensor.grid.chunks, tensor.grid.entries).scatter(1, indices, values)
        whole = work[name]
        if hparams.demo:
            sent = inverse(sent.double(), tensor.grid)
            whole = learning_rate(0, hparams.demo.learning_rate) * whole.double()
        expected = whole.clone()
        tensor.grid.view(expected).sub_(tensor.grid.join(sent))
        torch.testing.assert_close(left[name], expected.float(), atol=1e-6 if hparams.demo else 0, rtol=0)
