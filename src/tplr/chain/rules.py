"""The chain's rules as pure functions, with the chain's error names, for simulated chains.

Source: the chain's pallets at runtime spec 425. Simplified: epochs come at fixed blocks (newer runtimes can move
them), and incentive is a stake-weighted mean without Yuma's clipping, bonds and dividends.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from tplr.chain.base import Metagraph, Neuron
from tplr.errors import ChainError, NotPermitted, NotRegistered, RateLimited, Rejected

U16_MAX = 65535
COMMITMENT_BYTES = 128
# Minimum charge of a commitment, in bytes of the quota.
MIN_COMMITMENT_CHARGE = 100

# By the chain's name; the SDK's coarser error codes are misleading (``SpaceLimitExceeded`` is "limit_exceeded").
ERRORS: dict[str, type[ChainError]] = {
    "AccountNotAllowedCommit": NotRegistered,
    "HotKeyAccountNotExists": NotRegistered,
    "HotKeyNotRegisteredInNetwork": NotRegistered,
    "HotKeyNotRegisteredInSubNet": NotRegistered,
    "CommitmentSetRateLimitExceeded": RateLimited,
    "CommittingWeightsTooFast": RateLimited,
    "NetworkTxRateLimitExceeded": RateLimited,
    "RateLimitExceeded": RateLimited,
    "SettingWeightsTooFast": RateLimited,
    "SpaceLimitExceeded": RateLimited,
    "TooManyUnrevealedCommits": RateLimited,
    "TxRateLimitExceeded": RateLimited,
    "NeuronNoValidatorPermit": NotPermitted,
    "NotEnoughStakeToSetWeights": NotPermitted,
    "StakeAmountTooLow": NotPermitted,
}


def refusal(name: str, message: str, *, retry_at: int | None = None) -> ChainError:
    """Return the error for one of the chain's error names; ``Rejected`` for a name that is not in ``ERRORS``."""
    kind = ERRORS.get(name, Rejected)
    text = f"{name}: {message}"
    return RateLimited(text, name=name, retry_at=retry_at) if kind is RateLimited else kind(text, name=name)


@dataclass(frozen=True, kw_only=True)
class ChainLimits:
    """Settings of the subnet's owner, in blocks unless another unit is named. The defaults are those of a new subnet.

    Attributes:
        tempo: an epoch lasts ``tempo + 1`` blocks.
        max_uids, max_validators: number of uids on the subnet, and of permits that an epoch gives to the highest
            stakes.
        immunity_period: for this time after registration a neuron is replaced only if all others are immune, too.
        min_stake: alpha required for a permit and for setting weights.
        weights_rate_limit: minimum time between two settings of weights, and after registration.
        min_allowed_weights: minimum number of uids with weight; capped at the number of neurons.
        max_weight: largest share that a uid may get of a validator's weights, in units of 1/65535.
        commit_reveal: weights are sealed, and take effect ``reveal_epochs`` epochs later.
        max_unrevealed: maximum number of pending sealed weights of one hotkey.
        commitment_quota: bytes of commitments per hotkey and epoch.
    """

    tempo: int = 360
    max_uids: int = 256
    max_validators: int = 64
    immunity_period: int = 4096
    min_stake: float = 1000.0
    weights_rate_limit: int = 100
    min_allowed_weights: int = 1024
    max_weight: int = U16_MAX
    commit_reveal: bool = True
    reveal_epochs: int = 1
    max_unrevealed: int = 10
    commitment_quota: int = 3100

    def __post_init__(self) -> None:
        if min(self.tempo, self.max_uids, self.max_validators, self.reveal_epochs) < 1:
            raise ValueError(f"tempo, max_uids, max_validators and reveal_epochs must be at least 1: {self}")


def epoch_of(block: int, limits: ChainLimits, netuid: int) -> int:
    """Return the epoch that ``block`` belongs to; subnets are staggered by their number."""
    return (block + netuid + 1) // (limits.tempo + 1)


def epoch_start(epoch: int, limits: ChainLimits, netuid: int) -> int:
    """Return the first block of ``epoch``, which computes permits and incentives and applies sealed weights."""
    return max(0, epoch * (limits.tempo + 1) - netuid - 1)


def check_commitment(data: bytes, *, registered: bool, used: int, limits: ChainLimits, block: int, netuid: int) -> None:
    """Raise the chain's error unless a hotkey, charged ``used`` bytes in this epoch, may commit ``data``."""
    if not registered:
        raise refusal("AccountNotAllowedCommit", f"the hotkey is not registered on subnet {netuid}: register it first")
    if used + commitment_charge(data) > limits.commitment_quota:
        following = epoch_start(epoch_of(block, limits, netuid) + 1, limits, netuid)
        raise refusal(
            "SpaceLimitExceeded",
            f"{used} of {limits.commitment_quota} bytes used in this epoch; the next starts at block {following}",
            retry_at=following,
        )


def check_commitment_size(data: bytes) -> None:
    """Raise unless the SDK has a variant for this many bytes; the SDK refuses others before it sends anything."""
    if len(data) > COMMITMENT_BYTES:
        raise refusal("TooLong", f"a commitment holds {COMMITMENT_BYTES} bytes, got {len(data)}")


def commitment_charge(data: bytes) -> int:
    """Return the bytes of the quota that a commitment uses."""
    return max(MIN_COMMITMENT_CHARGE, len(data))


def quantize_weights(weights: Mapping[int, float]) -> list[tuple[int, int]]:
    """Return ``(uid, u16)`` by uid: weights in proportion to the largest, which becomes 65535; zeros are dropped.

    The arithmetic is that of ``bittensor.intents.weights.normalize``.
    """
    if any(not isfinite(weight) or weight < 0 for weight in weights.values()):
        raise refusal("InvalidWeight", "weights must be finite and at least 0")
    if any(not 0 <= uid <= U16_MAX for uid in weights):
        raise refusal("UidVecContainInvalidOne", f"uids must lie in 0..{U16_MAX}")
    top = max(weights.values(), default=0.0)
    if top == 0:
        raise refusal("WeightVecAllZero", "all weights are zero; nothing to set")
    row = [(uid, round(weight / top * U16_MAX)) for uid, weight in sorted(weights.items())]
    return [(uid, value) for uid, value in row if value > 0]


def capped(weights: Mapping[int, float], limit: float) -> dict[int, float]:
    """Return weights above 0 as shares with sum 1, and lower those above ``limit`` to it; equal ones if none fit.

    The arithmetic is that of ``bittensor.intents.weights.clip_to_max_weight``, which importing this package must not
    import.
    """
    if len(weights) * limit <= 1:
        return dict.fromkeys(weights, 1 / len(weights))
    total, rest = sum(weights.values()), 1.0
    shares = sorted((weight / total for weight in weights.values()), reverse=True)
    top = shares[0]
    if top > limit:
        for count, share in enumerate(shares, 1):
            rest -= share
            top = limit * rest / (1 - count * limit)
            if (count + 1) * limit >= 1 or top >= shares[count]:
                break
    lowered = {uid: min(weight / total, top) for uid, weight in weights.items()}
    total = sum(lowered.values())
    return {uid: share / total for uid, share in lowered.items()}


def fractions(row: Iterable[tuple[int, int]]) -> dict[int, float]:
    """Convert quantized weights to shares that sum to 1."""
    pairs = list(row)
    total = sum(value for _, value in pairs)
    return {uid: value / total for uid, value in pairs}


def check_weights_rate(neuron: Neuron, *, limits: ChainLimits, block: int, error: str) -> None:
    """Raise unless the rate limit has passed since the neuron's last update; registration counts as an update."""
    retry_at = neuron.last_update + limits.weights_rate_limit
    # LastUpdate 0 means "never", so the chain's first blocks are exempt.
    if neuron.last_update > 0 and block < retry_at:
        raise refusal(
            error, f"uid {neuron.uid} was updated at {neuron.last_update}: wait until {retry_at}", retry_at=retry_at
        )


def check_weights_at_pool(neuron: Neuron | None, *, limits: ChainLimits, block: int) -> None:
    """Raise the errors with which a node refuses a call before it enters a block; for plain weights only."""
    if neuron is None or limits.commit_reveal:
        return
    check_weights_rate(neuron, limits=limits, block=block, error="RateLimitExceeded")
    if neuron.stake < limits.min_stake:
        raise refusal("StakeAmountTooLow", f"stake {neuron.stake} of uid {neuron.uid} is below {limits.min_stake}")


def check_weights(
    row: Sequence[tuple[int, int]], *, hotkey: str, metagraph: Metagraph, limits: ChainLimits, unrevealed: int
) -> None:
    """Raise the errors with which an included call fails; ``metagraph``: of the block."""
    neuron = metagraph.by_hotkey().get(hotkey)
    if neuron is None:
        raise refusal("HotKeyNotRegisteredInSubNet", f"hotkey {hotkey} has no uid: register it first")
    if neuron.stake < limits.min_stake:
        raise refusal(
            "NotEnoughStakeToSetWeights", f"stake {neuron.stake} of uid {neuron.uid} is below {limits.min_stake}"
        )
    too_fast = "CommittingWeightsTooFast" if limits.commit_reveal else "SettingWeightsTooFast"
    check_weights_rate(neuron, limits=limits, block=metagraph.block, error=too_fast)
    if limits.commit_reveal and unrevealed >= limits.max_unrevealed:
        raise refusal("TooManyUnrevealedCommits", f"uid {neuron.uid} has {unrevealed} unrevealed weights already")
    uids = [uid for uid, _ in row]
    own_only = uids == [neuron.uid]
    if not neuron.permit and not own_only:
        raise refusal(
            "NeuronNoValidatorPermit", f"uid {neuron.uid} has no validator permit; each epoch grants permits by stake"
        )
    if len(set(uids)) != len(uids):
        raise refusal("DuplicateUids", f"a uid appears twice in {uids}")
    unknown = sorted(set(uids) - {other.uid for other in metagraph.neurons})
    if unknown:
        raise refusal("UidVecContainInvalidOne", f"no such uids on the subnet: {unknown}")
    needed = min(limits.min_allowed_weights, len(metagraph.neurons))
    if len(uids) < needed and not own_only:
        raise refusal("WeightVecLengthIsLow", f"{len(uids)} uids with weight, at least {needed} are needed")
    values = [value for _, value in row]
    # The values are rounded.
    if not own_only and max(values) / sum(values) > (limits.max_weight + 1) / U16_MAX:
        raise refusal("MaxWeightExceeded", f"a uid has more than {limits.max_weight} of {U16_MAX} of the weight")


def permitted(neurons: Iterable[Neuron], limits: ChainLimits) -> set[int]:
    """Return the uids with a permit after an epoch: the highest stakes; ties go to the lowest uids."""
    staked = [neuron for neuron in neurons if neuron.stake > 0 and neuron.stake >= limits.min_stake]
    ranked = sorted(staked, key=lambda neuron: (-neuron.stake, neuron.uid))
    return {neuron.uid for neuron in ranked[: limits.max_validators]}


def incentives(metagraph: Metagraph, weights: Mapping[int, Mapping[int, float]]) -> dict[int, float]:
    """Return the stake-weighted mean of the permit holders' weights, by uid; sums to 1, or all 0 without weights."""
    voters = [neuron for neuron in metagraph.neurons if neuron.permit and neuron.uid in weights]
    total = sum(neuron.stake for neuron in voters)
    shares = dict.fromkeys((neuron.uid for neuron in metagraph.neurons), 0.0)
    for voter in voters if total > 0 else []:
        for uid, fraction in weights[voter.uid].items():
            if uid in shares:
                shares[uid] += voter.stake / total * fraction
    return shares


def uid_for_newcomer(
    neurons: Sequence[Neuron], registered_at: Mapping[int, int], *, limits: ChainLimits, block: int
) -> int:
    """Return the uid of a new registration: the lowest free one or, on a full subnet, the one with least incentive.

    An immune neuron is replaced only if all are immune; ties go to the earliest registration.
    """
    taken = {neuron.uid for neuron in neurons}
    free = next((uid for uid in range(limits.max_uids) if uid not in taken), None)
    if free is not None:
        return free
    since = registered_at
    *_, uid = min((block - since[n.uid] < limits.immunity_period, n.incentive, since[n.uid], n.uid) for n in neurons)
    return uid
