"""``hparams.json`` as one typed, validated, frozen object: the constants that all nodes of a run share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tplr import migration
from tplr.errors import ConfigError
from tplr.keys import RunVersion
from tplr.model_check import FIXED_HEAD_DIM, MODEL_TYPES, USUAL_ACTIVATIONS, key_problems, refused_values
from tplr.seeds import Profile
from tplr.tokenizer_files import pretrained_tokenizer
from tplr.untrusted import printable, unique_keys

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast


Precision = Literal["float32", "bfloat16"]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    def _problems(self) -> list[str]:
        """Return the problems of the combination of these values, each of which is valid; keys have their full name."""
        return []

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if problems := self._problems():
            raise ValueError(*problems)
        return self


class ModelParams(_Strict):
    """The model; names are those of the type's configuration in ``transformers``.

    Other keys are passed on to that configuration, which must know them.

    Attributes:
        model_type: one of ``MODEL_TYPES``.
        head_dim: null for ``hidden_size / num_attention_heads``.
    """

    model_config = ConfigDict(extra="allow")

    model_type: str = "llama"
    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int | None = Field(default=None, gt=0)
    max_position_embeddings: int = Field(gt=0)
    initializer_range: float = Field(gt=0, le=1)
    tie_word_embeddings: bool

    @property
    def head_size(self) -> int:
        """Dimension of one attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def _problems(self) -> list[str]:
        """As ``_Strict``. Models with other than ``USUAL_ACTIVATIONS`` and declared keys are built, without weights."""
        if self.model_type not in MODEL_TYPES:
            return [f"model.model_type is {self.model_type!r}; expected one of {', '.join(MODEL_TYPES)}"]
        more, activation, sizes = self.model_extra or {}, MODEL_TYPES[self.model_type], self._size_problems()
        missing = [] if activation in more else [f"model.{activation} is missing"]
        usual = more in ({}, *({activation: one} for one in USUAL_ACTIVATIONS))
        if usual and not self.hidden_size % self.num_attention_heads:  # llama wants this also with head_dim
            return sizes + missing
        found, passed = key_problems(self.model_type, more)
        if not sizes:
            found += refused_values(self.model_type, passed, self.for_transformers)
        return sizes + missing + found

    def _size_problems(self) -> list[str]:
        heads, found = self.num_attention_heads, []
        if self.head_dim and self.model_type in FIXED_HEAD_DIM:
            found.append(migration.unknown_key("model.head_dim", f"of {self.model_type}"))
        if self.hidden_size % heads and self.head_dim is None:
            found.append(
                f"model.hidden_size {self.hidden_size} is not a multiple of num_attention_heads {heads}: give head_dim"
            )
        elif self.head_size % 2:
            found.append(
                f"model: attention heads have {self.head_size} entries (head_dim, or else hidden_size / "
                "num_attention_heads): rotary embeddings need an even number"
            )
        if heads % self.num_key_value_heads:
            found.append(
                f"model.num_attention_heads {heads} is not a multiple of num_key_value_heads {self.num_key_value_heads}"
            )
        return found

    def for_transformers(self, more: Mapping[str, Any]) -> PreTrainedConfig:
        """Return the type's configuration with these other keys."""
        from transformers import CONFIG_MAPPING

        declared = self.model_dump(include=ModelParams.model_fields.keys() - {"model_type", "head_dim"})
        values = {**declared, **deepcopy(dict(more))}  # a configuration changes its values
        if self.model_type not in FIXED_HEAD_DIM:
            values["head_dim"] = self.head_size
        # Default token ids affect the computation only through the padding row of an embedding, so there is none.
        values |= {"use_cache": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        return CONFIG_MAPPING[self.model_type](**values)


class LearningRate(_Strict):
    """A linear warm-up and cosine cycles (``training/schedule.py``).

    Attributes:
        t_max: number of steps of the first cycle.
        start_factor, floor_factor: fractions of ``peak`` at the start of the warm-up and at the end of a cycle.
    """

    peak: float = Field(gt=0)
    warmup_steps: int = Field(ge=0)
    t_max: int = Field(gt=0)
    start_factor: float = Field(gt=0, le=1)
    floor_factor: float = Field(ge=0, le=1)


class DemoParams(_Strict):
    """Constants of ``training/outer/demo.py``; steps of the learning rate are windows."""

    learning_rate: LearningRate
    momentum_decay: float = Field(ge=0, le=1)
    weight_decay: float = Field(ge=0, lt=1)


class OuterRate(_Strict):
    """The outer learning rate at one outer step."""

    step: int = Field(gt=0)
    rate: float = Field(gt=0)


class SparselocoParams(_Strict):
    """Constants of ``training/inner.py`` and ``training/outer/sparseloco.py``.

    Attributes:
        inner_optimizer: ``adamw``, or ``muon`` for hidden matrices and AdamW for the rest
            (``training/inner_optimizers.py``).
        muon_momentum: momentum of Muon; absent with ``adamw``.
        inner_steps: number of inner optimizer steps in a window.
        batches_per_inner_step: number of batches whose gradients are averaged for a step.
        inner_learning_rate: its steps are ``inner_steps`` for each window since the run's start.
        gradient_clip_norm: largest L2 norm of all gradients together.
        outer_learning_rate: at the run's start.
        outer_learning_rate_points: by ascending steps. The rate is linear from the run's start to the first point and
            between points, and constant after the last one (``training/schedule.py``).
        outer_momentum: 0 for plain gradient descent.
        expected_share: a miner trains from the weights that it expects: the agreed ones, moved by this share of the
            outer step along its own work that they lack. That is its error feedback and, with ``outer_delay`` 1, its
            last update until it is applied.
    """

    inner_optimizer: Literal["adamw", "muon"] = "adamw"
    muon_momentum: float | None = Field(default=None, ge=0, lt=1)
    inner_steps: int = Field(gt=0)
    batches_per_inner_step: int = Field(gt=0)
    inner_learning_rate: LearningRate
    adam_beta1: float = Field(ge=0, lt=1)
    adam_beta2: float = Field(ge=0, lt=1)
    adam_epsilon: float = Field(gt=0)
    weight_decay: float = Field(ge=0)
    gradient_clip_norm: float = Field(gt=0)
    error_feedback_decay: float = Field(ge=0, le=1)
    outer_learning_rate: float = Field(gt=0)
    outer_learning_rate_points: tuple[OuterRate, ...] = Field(default=(), strict=False, max_length=64)
    outer_momentum: float = Field(ge=0, lt=1)
    outer_nesterov: bool
    expected_share: float = Field(default=0.0, ge=0, le=1)

    def _problems(self) -> list[str]:
        found = []
        if self.outer_nesterov and not self.outer_momentum:
            found.append("sparseloco.outer_nesterov without sparseloco.outer_momentum has no effect: set it to false")
        if any(later.step <= earlier.step for earlier, later in pairwise(self.outer_learning_rate_points)):
            found.append("sparseloco.outer_learning_rate_points: steps must ascend")
        given, needed = self.muon_momentum is not None, self.inner_optimizer == "muon"
        if given != needed:
            found.append(
                f"sparseloco.inner_optimizer is {self.inner_optimizer!r}: {'remove' if given else 'give'} "
                "sparseloco.muon_momentum"
            )
        return found


class StoreParams(_Strict):
    """Assignment of the sequences of a token store (``stores/sequences.py``).

    Attributes:
        samples_per_window: number of sequences that a uid trains on in a window.
        uids: number of uids with assigned sequences; larger uids have none.
    """

    samples_per_window: int = Field(gt=0)
    uids: int = Field(gt=0)


class DocumentedScores(_Strict):
    """Constants of ``scoring/documented``; other profiles ignore them. The defaults are those of documented networks.

    Attributes:
        evaluation_bins: groups of similar score, one of which is evaluated in each window.
        binary_score_ma_alpha: rate of the moving average of the binary indicator.
        openskill_beta, openskill_tau: standard deviation of one window's performance, and growth of a rating's
            uncertainty between two windows.
        reset_inactive_windows: windows without an upload after which a miner's scores are reset.
    """

    evaluation_bins: int = Field(default=5, gt=0)
    binary_score_ma_alpha: float = Field(default=0.05, gt=0, le=1)
    openskill_beta: float = Field(default=7.0, gt=0)
    openskill_tau: float = Field(default=0.1, ge=0)
    reset_inactive_windows: int = Field(default=25, gt=0)


class Upgrade(_Strict):
    """A change of the run's rules, announced before it takes effect (``docs/upgrades.md``).

    Attributes:
        window: the first window under the new rules.
        spec_version: the version from that window on.
    """

    window: int = Field(gt=0)
    spec_version: int = Field(gt=0)


class HParams(_Strict):
    """Every constant of a run. Counts are plain integers; other units are in the names.

    Attributes:
        spec_version: part of every object key; nodes of different versions do not see each other.
        upgrades: by ascending window and version.
        profile: the rules of ``documented`` networks, or ``hardened``, as in the project's files (see ``seeds.py``).
        data: training data: ``pages`` of text (``pages_per_window``), or sequences of a token ``store``, whose
            constants are the group ``store``.
        page_address: how a page number maps to rows: ``exact``, or ``group-average`` as in documented networks. The
            dataset's manifest must have the same value.
        time_window_delta_seconds: time after a window's end within which its updates must be written.
        commit_margin_seconds: a miner stops training this long before the window's expected end.
        gather_patience_seconds: for past windows, an unreachable bucket is retried for this long.
        manifest_timeout_seconds: time to wait for the included set after gathering; 0 if none is published.
        relay_seconds: the longest time from an elector's decision to publish something until all others have read it:
            to write, to poll and to read, and the difference of their clocks (``exchange/election.py``).
        elector_stake_share: share of the largest validators' stake that makes a validator an elector. The documents of
            an election have room for the 50 electors that 0.02 allows (``exchange/ballots.py``).
        checkpoint_frequency: windows between two published checkpoints; an elector keeps ``checkpoints_kept``.
        checkpoint_init_version: start with the weights of the newest checkpoint of that version that most electors
            publish alike; null for random weights by ``init_seed``.
        require_commit: gather only updates whose hash was published before the window ended.
        gradient_retention_windows: windows after which a node deletes its updates, commits and score reports. A node
            that was offline for longer cannot replay them.
        precision: dtype of forward and backward passes, in training and evaluation; weights are float32.
        outer_delay: with 1, a miner trains a window while the previous window's updates are gathered and applied; with
            0, after that.
        outer: the scheme of the run. The group of its name holds its constants; the other group is absent.
        topk_compression: number of values sent for each chunk of ``target_chunk`` squared entries.
        topk_selection: ``chunk``: the largest values of the chunk; ``group``: the largest value of each of at least
            ``topk_compression`` groups, whose indices need fewer bits (``compress/interleaved.py``), in chunks whose
            rows are spread over the matrix.
        quantization_bits: 1, 2, 4, 8, or 0 for values sent as float32.
        quantization_scale, quantization_codebook, quantization_rounding: see ``compress/quantize.py``.
        stale_after_windows: age at which a miner's error feedback (in windows) and inner optimizer (in outer steps) are
            reset.
        reserve_peers: number of listed peers that replace missing ones.
        start_horizon_windows: a start window further ahead than this is ignored.
        probation_windows: number of windows in which a miner is only measured before it can be on the peer list, and
            for which a miner that breaks a rule is kept off it; with 0, all active miners can be on the list.
        uids_per_window: number of miners that take the own-pages test in each window. Choose two thirds of the
            measured miners, because each needs many tests in ``pay_windows`` windows.
        validator_sample_rate: fraction of a page list's batches that a gradient or a loss is measured on.
        evaluation_sequences: minimum number of sequences of these batches, if the page list has as many.
        sealed_scores: validators publish the hash of a score report at once, and the report when the weights that
            follow from it are in force.
        pay_windows: number of last windows whose evidence determines the scores.
        burn_uid: the subnet owner's uid, whose share the chain burns; gets all weight when no miner has had a score for
            ``pay_windows`` windows. Without it, weights that pay for older work stay on chain.
        sync_max_steps_behind: a miner that is more steps behind is out of sync.
        digest_interval_windows: windows between two published digests of the whole model; there is also one before each
            checkpoint.
    """

    spec_version: int = Field(ge=0)
    upgrades: tuple[Upgrade, ...] = Field(default=(), strict=False, max_length=64)
    profile: Profile

    tokenizer_name: str = Field(min_length=1)
    model: ModelParams
    init_seed: int = Field(ge=0)
    sequence_length: int = Field(gt=1)
    batch_size: int = Field(gt=0)
    precision: Precision
    data: Literal["pages", "store"]
    pages_per_window: int = Field(gt=0)
    page_address: Literal["exact", "group-average"]
    store: StoreParams | None = None

    blocks_per_window: int = Field(gt=0)
    time_window_delta_seconds: float = Field(gt=0)
    commit_margin_seconds: float = Field(ge=0)
    gather_patience_seconds: float = Field(gt=0)
    manifest_timeout_seconds: float = Field(ge=0)
    relay_seconds: float = Field(default=2.0, gt=0)
    elector_stake_share: float = Field(default=0.05, ge=0.02, le=1)
    require_commit: bool
    gradient_retention_windows: int = Field(gt=0)
    checkpoint_frequency: int = Field(gt=0)
    checkpoints_kept: int = Field(gt=0)
    checkpoint_init_version: str | None

    outer_delay: Literal[0, 1] = 0
    outer: Literal["demo", "sparseloco"]
    demo: DemoParams | None = None
    sparseloco: SparselocoParams | None = None
    topk_compression: int = Field(gt=0)
    topk_selection: Literal["chunk", "group"] = "chunk"
    target_chunk: int = Field(gt=0)
    quantization_bits: Literal[0, 1, 2, 4, 8]
    quantization_scale: Literal["chunk", "tensor"]
    quantization_codebook: Literal["lloyd", "bins"]
    quantization_rounding: Literal["nearest", "stochastic"]
    stale_after_windows: int = Field(gt=0)

    minimum_peers: int = Field(gt=0)
    max_topk_peers: int = Field(gt=0)
    reserve_peers: int = Field(ge=0)
    peer_replacement_frequency: int = Field(gt=0)
    peer_list_window_margin: int = Field(gt=0)
    start_horizon_windows: int = Field(default=100, gt=0)
    recent_windows: int = Field(gt=0)
    probation_windows: int = Field(ge=0)
    eval_stake_limit: float = Field(gt=0)

    validator_offset: int = Field(gt=0)
    uids_per_window: int = Field(gt=0)
    validator_sample_rate: float = Field(gt=0, le=1)
    evaluation_sequences: int = Field(gt=0)
    eval_lr_factor: float = Field(gt=0)
    pay_windows: int = Field(gt=0)
    sync_max_steps_behind: int = Field(ge=0)
    power_normalisation: float = Field(gt=0)
    windows_per_weights: int = Field(gt=0)
    burn_uid: int | None = Field(default=None, ge=0)
    sealed_scores: bool
    documented_scores: DocumentedScores = DocumentedScores()

    fingerprint_samples: int = Field(gt=0)
    digest_interval_windows: int = Field(gt=0)

    def _problems(self) -> list[str]:
        positions = self.model.max_position_embeddings
        problems = self._scheme_problems()
        if self.sequence_length > positions:
            problems.append(
                f"sequence_length {self.sequence_length} is above model.max_position_embeddings {positions}"
            )
        if self.minimum_peers > self.max_topk_peers:
            problems.append(f"minimum_peers {self.minimum_peers} is above max_topk_peers {self.max_topk_peers}")
        if (self.store is not None) != (self.data == "store"):
            problems.append(f"data is {self.data!r}: {'give' if self.store is None else 'remove'} the group 'store'")
        if self.store and self.store.samples_per_window % self.batch_size:
            problems.append(
                f"store.samples_per_window {self.store.samples_per_window} is not a multiple of batch_size "
                f"{self.batch_size}"
            )
        needed = max(self.recent_windows, self.validator_offset) + 1
        if self.gradient_retention_windows < needed:
            problems.append(
                f"gradient_retention_windows {self.gradient_retention_windows} is below {needed}: recent_windows "
                f"{self.recent_windows} and validator_offset {self.validator_offset} need older updates"
            )
        if self.profile == "documented" and self.probation_windows:
            problems.append("probation_windows: the documented profile has no probation, set it to 0")
        needed = max(2, self.probation_windows)
        if self.probation_windows and self.pay_windows < needed:
            problems.append(
                f"pay_windows {self.pay_windows} is below {needed}: no miner could earn a place on the peer list, for "
                f"which as many windows must be measured (probation_windows {self.probation_windows})"
            )
        needed = self.windows_per_weights + 2 * self.pay_windows
        if self.sealed_scores and self.gradient_retention_windows < needed:
            problems.append(
                f"gradient_retention_windows {self.gradient_retention_windows} is below {needed}: with sealed_scores, "
                f"nobody could audit scores after windows_per_weights {self.windows_per_weights}, as twice pay_windows "
                f"{self.pay_windows} of updates and reports are needed"
            )
        versions = [self.spec_version, *(one.spec_version for one in self.upgrades)]
        windows = [one.window for one in self.upgrades]
        if any(later <= earlier for row in (versions, windows) for earlier, later in pairwise(row)):
            problems.append("upgrades: windows and spec_version must ascend, each spec_version above the one before")
        return problems

    def _scheme_problems(self) -> list[str]:
        problems = [
            f"outer is {self.outer!r}: {'give' if group is None else 'remove'} the group {scheme!r}: exactly the "
            "chosen scheme's constants are expected"
            for scheme, group in {"demo": self.demo, "sparseloco": self.sparseloco}.items()
            if (group is not None) != (scheme == self.outer)
        ]
        if self.outer_delay and self.outer == "demo":
            problems.append(
                "outer_delay is 1: set it to 0 with the scheme 'demo', whose gradients would be those of an older model"
            )
        return problems

    @property
    def version(self) -> RunVersion:
        """``spec_version`` as it appears in object keys, with its ``upgrades``."""
        return RunVersion(str(self.spec_version), [(one.window, str(one.spec_version)) for one in self.upgrades])

    def model_config_for_transformers(self) -> PreTrainedConfig:
        """Build the model's configuration; importing this module does not import transformers."""
        return self.model.for_transformers(self.model.model_extra or {})

    def load_tokenizer(self, folder: Path | None = None) -> PreTrainedTokenizerFast:
        """Load the run's tokenizer from a local path (relative to ``folder``) or by its hub name.

        Raises:
            ConfigError: not found, or larger than ``model.vocab_size``.
            HubUnavailable: it is not on this machine, and the hub can't be reached.
        """
        tokenizer = pretrained_tokenizer(self.tokenizer_name, "tokenizer_name", folder)
        if len(tokenizer) > self.model.vocab_size:
            raise ConfigError(
                f"tokenizer {self.tokenizer_name!r} has {len(tokenizer)} tokens, model.vocab_size is "
                f"{self.model.vocab_size}: raise it to at least that"
            )
        return tokenizer


def load_hparams(path: Path | str = "hparams.json") -> HParams:
    """Read and check a hparams file.

    Raises:
        ConfigError: the file is missing or not JSON, or keys are unknown, missing or wrong; lists all problems. A key
            must not be repeated.
    """
    path = Path(path)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except FileNotFoundError as error:
        raise ConfigError(f"hparams: no file {path}; start in the project's folder or give --hparams FILE") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"hparams: can't read {path}: {error}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"hparams: {path} line {error.lineno} is not JSON: {error.msg}") from error
    except RecursionError as error:
        raise ConfigError(f"hparams: {path} is not JSON: it is nested too deeply") from error
    except ValueError as error:
        raise ConfigError(f"hparams: {path} is not JSON: {error}") from error
    if isinstance(raw, dict):
        # Keys that start with an underscore are comments.
        raw = {key: value for key, value in raw.items() if not key.startswith("_")}
    try:
        return HParams.model_validate(raw)
    except ValidationError as error:
        raise ConfigError([f"hparams: {path}: {text}" for text in problems_of(error)]) from error


def problems_of(error: ValidationError) -> list[str]:
    """Return the texts of all problems of constants, each with the full name of its key."""
    return [text for problem in error.errors() for text in _explain(problem)]


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of these pairs; only comments may have one name. Raises ValueError."""
    unique_keys([(key, value) for key, value in pairs if not key.startswith("_")])
    return dict(pairs)


def _explain(problem: Mapping[str, Any]) -> Sequence[str]:
    """Return the texts of one of pydantic's errors: several if it is about a combination of values."""
    if problem["type"] == "value_error":
        return problem["ctx"]["error"].args
    where = printable(".".join(map(str, problem["loc"]))) or "the file"
    if problem["type"] == "extra_forbidden":
        return [migration.unknown_key(where)]
    if problem["type"] == "missing":
        return [f"{where} is missing"]
    return [f"{where} is {problem['input']!r}: {problem['msg']}" if problem["loc"] else problem["msg"]]
