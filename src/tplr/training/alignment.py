"""Temporary stand-in of part C's alignment: dense, small models only."""

from typing import NamedTuple

import numpy as np
import torch

from tplr.errors import TrainingError
from tplr.training.evaluation import Baseline, trial_step_applied
from tplr.training.loss import token_losses


class Alignment(NamedTuple):
    uids: tuple[int, ...]
    products: tuple[float, ...]
    norms: tuple[float, ...]
    gram: tuple[float, ...]


def _flat(model):
    return torch.cat([one.detach().double().flatten() for one in model.parameters()])


def align(model, outer, updates, batches, *, step, precision):
    losses = []
    model.zero_grad()
    with torch.enable_grad():
        for batch in batches:
            ids = torch.as_tensor(batch)
            logits = model(input_ids=ids).logits[:, :-1].float()
            found = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction='none').double().mean(dim=1)
            losses.append(found.detach())
            (found.mean() / len(batches)).backward()
    losses = torch.cat(losses).numpy()
    if not np.isfinite(losses).all():
        raise TrainingError("the model's own loss is not finite: nobody can be measured against it")
    gradient = torch.cat([one.grad.double().flatten() for one in model.parameters()])
    model.zero_grad()
    before, steps, norms = _flat(model), [], []
    for update in updates:
        with trial_step_applied(model, outer, update, step=step):
            steps.append(before - _flat(model))
        norms.append(float(sum(update.coefficients(n)[1].double().square().sum() for n in update.spec.tensors)) ** 0.5)
    d = torch.stack(steps)
    gram = d @ d.T
    scale = float(gram.diagonal().median()) ** 0.5 or 1.0
    rows = np.triu_indices(len(updates))
    return Baseline(np.asarray(batches), losses), Alignment(
        tuple(u.uid for u in updates),
        tuple((d @ gradient / (gradient.norm() * scale)).tolist()),
        tuple(norms),
        tuple((gram / scale**2).numpy()[rows].tolist()),
    )
