"""One wrong key anywhere in hparams.json is named before anything starts."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tplr.errors import ConfigError
from tplr.hparams import (
    DemoParams,
    HParams,
    LearningRate,
    OuterRate,
    SparselocoParams,
    load_hparams,
)
from tplr.keys import gradient_key, start_window_key
from tplr.localnet.plan import scheme_constants
from tplr.model_check import FIXED_HEAD_DIM, MODEL_TYPES, USUAL_ACTIVATIONS

ROOT = Path(__file__).parents[1]
SMALL = ROOT / "src/tplr/localnet/hparams.json"
GROUP = scheme_constants("sparseloco")["sparseloco"]
RATES = "outer_learning_rate_points"


def written(folder: Path, **changes: object) -> Path:
    raw = scheme_constants("demo")
    for key, value in changes.items():
        raw[key] = value
        if value is None:
            del raw[key]
    path = folder / "hparams.json"
    path.write_text(json.dumps(raw))
    return path


@pytest.mark.parametrize("path", [*sorted(ROOT.glob("hparams*.json")), SMALL], ids=lambda path: path.stem)
def test_shipped_files_are_valid(path: Path) -> None:
    assert load_hparams(path).version == "1"


def test_all_problems_are_named_at_once(tmp_path: Path) -> None:
    path = written(tmp_path, learning_rte=1.0, batch_size=None, topk_compression=-3, profile="fast")
    with pytest.raises(ConfigError) as caught:
        load_hparams(path)
    text = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 4
    assert "learning_rte is not a known key" in text
    assert "batch_size is missing" in text
    assert "topk_compression is -3: Input should be greater than 0" in text
    assert "profile is 'fast'" in text


def test_problems_of_groups_are_named_beside_those_of_keys(tmp_path: Path) -> None:
    model = json.loads(SMALL.read_text())["model"] | {"num_attention_heads": 3, "hidden_akt": "silu"}
    group = GROUP | {"muon_momentum": 0.9, "outer_nesterov": True}
    path = written(tmp_path, batch_size="8", model=model, sparseloco=group)
    with pytest.raises(ConfigError) as caught:
        load_hparams(path)
    told = sorted(problem.removeprefix(f"hparams: {path}: ") for problem in caught.value.problems)
    assert [problem.split(" ", 1)[0] for problem in told] == [
        "batch_size",
        "model.hidden_akt",
        "model.hidden_size",
        "model.num_attention_heads",
        "sparseloco.inner_optimizer",
        "sparseloco.outer_nesterov",
    ]


def test_each_problem_of_a_combination_is_told_on_its_own(tmp_path: Path) -> None:
    path = written(tmp_path, sequence_length=129, minimum_peers=16)
    with pytest.raises(ConfigError) as caught:
        load_hparams(path)
    assert sorted(caught.value.problems) == [
        f"hparams: {path}: minimum_peers 16 is above max_topk_peers 15",
        f"hparams: {path}: sequence_length 129 is above model.max_position_embeddings 128",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_length": 129}, "sequence_length 129 is above model.max_position_embeddings 128"),
        ({"minimum_peers": 16}, "minimum_peers 16 is above max_topk_peers 15"),
        ({"gradient_retention_windows": 3}, "gradient_retention_windows 3 is below 4: recent_windows 3"),
        ({"windows_per_weights": 61}, "gradient_retention_windows 100 is below 101: with sealed_scores, nobody could"),
        ({"profile": "documented"}, "probation_windows: the documented profile has no probation, set it to 0"),
        ({"probation_windows": 21}, "pay_windows 20 is below 21: no miner could earn a place on the peer list"),
        ({"elector_stake_share": 0.019}, "elector_stake_share is 0.019: Input should be greater than or equal to 0.02"),
        ({"pay_windows": 1}, "pay_windows 1 is below 2: no miner could earn a place on the peer list"),
        ({"batch_size": "8"}, "batch_size is '8'"),
        ({"model": {}}, "model.hidden_size is missing"),
        ({"data": "store"}, "data is 'store': give the group 'store'"),
        ({"store": {"samples_per_window": 8, "uids": 4}}, "data is 'pages': remove the group 'store'"),
        ({"data": "store", "store": {"samples_per_window": 9, "uids": 4}}, "9 is not a multiple of batch_size 8"),
        ({"outer_delay": 1}, "outer_delay is 1: set it to 0 with the scheme 'demo'"),
        ({"demo": None}, "outer is 'demo': give the group 'demo'"),
        ({"sparseloco": GROUP}, "outer is 'demo': remove the group 'sparseloco'"),
        ({"outer": "sparseloco"}, "outer is 'sparseloco': remove the group 'demo'"),
        ({"outer": "sparseloco", "demo": None, "sparseloco": GROUP | {"outer_nesterov": True}}, "has no effect"),
        (
            {"outer": "sparseloco", "demo": None, "sparseloco": GROUP | {RATES: [{"step": 9, "rate": 1.0}] * 2}},
            "sparseloco.outer_learning_rate_points: steps must ascend",
        ),
        ({"outer": "sparseloco", "demo": None, "sparseloco": GROUP | {"muon_momentum": 0.9}}, "remove sparseloco.muon"),
        ({"outer": "sparseloco", "demo": None, "sparseloco": GROUP | {"inner_optimizer": "muon"}}, "give sparseloco.m"),
    ],
)
def test_wrong_values(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_hparams(written(tmp_path, **changes))


def test_missing_file_and_broken_json_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give --hparams FILE"):
        load_hparams(tmp_path / "nowhere.json")
    (tmp_path / "torn.json").write_text('{"spec_version": 1,\n "profile" }')
    with pytest.raises(ConfigError, match=r"torn\.json line 2 is not JSON"):
        load_hparams(tmp_path / "torn.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    for unreadable in (tmp_path, tmp_path / "binary.json"):
        with pytest.raises(ConfigError, match="can't read"):
            load_hparams(unreadable)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"batch_size": 4, "batch_size": 8}', "is not JSON: key 'batch_size' is given twice"),
        ('{"model": {"vocab_size": 4, "vocab_size": 4}}', "is not JSON: key 'vocab_size' is given twice"),
        ("[" * 100_000, "is not JSON: it is nested too deeply"),
        ('{"batch_size": ' + "9" * 5000 + "}", "is not JSON: Exceeds the limit"),
    ],
)
def test_what_json_leaves_open_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "hparams.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_hparams(path)


def test_comments_may_have_one_name(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_text('{"_": "one", "_": "two", ' + path.read_text()[1:])
    assert load_hparams(path).version == "1"


@pytest.mark.parametrize("key", ["eval_lr_factor", "power_normalisation", "time_window_delta_seconds"])
def test_numbers_are_finite(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is inf: Input should be a finite number"):
        load_hparams(written(tmp_path, **{key: float("inf")}))


def test_hparams_can_not_be_changed() -> None:
    hparams = load_hparams(SMALL)
    with pytest.raises(ValueError, match="frozen"):
        hparams.batch_size = 1  # pyright: ignore[reportAttributeAccessIssue]


def test_every_key_is_used() -> None:
    """A constant that nothing reads would look effective and do nothing."""
    code = "\n".join(
        path.read_text() for path in sorted((ROOT / "src/tplr").rglob("*.py")) if path.name != "hparams.py"
    )
    own = (ROOT / "src/tplr/hparams.py").read_text()
    groups = (HParams, LearningRate, DemoParams, OuterRate, SparselocoParams)
    for name in (name for group in groups for name in group.model_fields):
        assert re.search(rf"\.{name}\b", code) or re.search(rf"self\.{name}\b", own), name


def test_model_config_takes_every_field() -> None:
    hparams = load_hparams(SMALL)
    config = hparams.model_config_for_transformers()
    given = hparams.model.model_dump(exclude_none=True)
    assert {name: getattr(config, name) for name in given} == given
    assert config.head_dim == hparams.model.head_size
    assert config.pad_token_id is config.bos_token_id is config.eos_token_id is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_akt": "silu"}, "model.hidden_akt is not a known key of llama"),
        ({"rope_theta": 5e5}, "model.rope_theta is an old key; write instead: model.rope_parameters.rope_theta"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "model.rope_scaling is an old key; write instead: model.",
        ),
        ({"pad_token_id": 0}, "model.pad_token_id is not a known key of llama"),
        ({"model_type": "gemma3_text"}, "model.hidden_activation is missing"),
        (
            {"model_type": "gemma3_text", "hidden_activation": "gelu"},
            "model.hidden_act is not a known key of gemma3_text",
        ),
        ({"model_type": "olmo2", "head_dim": 16}, "model.head_dim is not a known key of olmo2"),
        ({"attention_dropout": 0.1}, "model.attention_dropout is 0.1: remove it; with dropout"),
        ({"model_type": "gpt2"}, "model.model_type is 'gpt2'; expected one of gemma3_text, llama, mistral"),
        ({"model_type": "qwen3_moe", "router_aux_loss_coef": 0.1}, "model.router_aux_loss_coef is not a known key"),
        ({"num_attention_heads": 3}, "is not a multiple of num_attention_heads 3: give head_dim"),
        ({"hidden_size": 60}, "attention heads have 15 entries (head_dim, or else hidden_size / num_attention_heads)"),
        ({"head_dim": 3}, "attention heads have 3 entries"),
        ({"initializer_range": 2.0}, "model.initializer_range is 2.0: Input should be less than or equal to 1"),
        ({"hidden_act": "silly"}, "model.hidden_act is 'silly'; expected one of gelu, "),
        ({"hidden_act": ["silu"]}, "model.hidden_act is ['silu']; expected one of gelu, "),
        ({"rms_norm_eps": "abc"}, "model.rms_norm_eps is 'abc': expected as LlamaConfig of transformers describes it"),
        ({"attention_bias": "abc"}, "model.attention_bias is 'abc': expected as LlamaConfig of transformers describes"),
        (
            {"model_type": "gemma3_text", "hidden_act": None, "hidden_activation": "silu", "layer_types": ["no"]},
            "model.layer_types is ['no']: expected as Gemma3TextConfig of transformers describes it (ValueError: ",
        ),
        ({"rope_parameters": {"rope_type": "foo"}}, "model.rope_parameters is {'rope_type': 'foo'}: expected as Llama"),
        ({"rope_parameters": {"rope_type": "yarn"}}, '(KeyError: "Missing required keys in `rope_parameters` for'),
        ({"rope_parameters": {"rope_type": "linear", "factor": "abc"}}, "'factor': 'abc'}: expected as LlamaConfig"),
        ({"rope_parameters": {"rope_theta": "abc"}}, "model.rope_parameters is {'rope_theta': 'abc'}: expected as"),
        (
            {"hidden_size": 66, "head_dim": 16},
            "model: expected as LlamaConfig of transformers describes it (ValueError",
        ),
        (
            {"model_type": "qwen3_moe", "num_experts": 4},
            "model.num_experts is 4: num_experts_per_tok is 8; expected from 1 to num_experts, 4",
        ),
        (
            {"model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 32},
            "model: num_experts_per_tok is 32; expected from 1 to num_experts, 16",
        ),
        (
            {"model_type": "qwen3_moe", "num_experts_per_tok": 0},
            "model.num_experts_per_tok is 0: num_experts_per_tok is 0; expected from 1 to num_experts, 128",
        ),
    ],
)
def test_model_keys_are_those_of_the_type(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    model = json.loads(SMALL.read_text())["model"] | changes
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_hparams(written(tmp_path, model=model))


def test_all_values_that_transformers_refuses_are_named_at_once(tmp_path: Path) -> None:
    model = json.loads(SMALL.read_text())["model"] | {"rms_norm_eps": "\x1b", "mlp_bias": 3, "attention_bias": False}
    path = written(tmp_path, model=model | {"hidden_act": "silly", "hidden_akt\x1b": 1}, batch_size="8")
    with pytest.raises(ConfigError) as caught:
        load_hparams(path)
    told = [problem.removeprefix(f"hparams: {path}: ") for problem in caught.value.problems]
    named = ["batch_size", "model.hidden_act", "model.hidden_akt\\x1b", "model.mlp_bias", "model.rms_norm_eps"]
    assert sorted(one.split(" ", 1)[0] for one in told) == named
    assert all(one.isprintable() for one in told)


def test_what_is_known_without_transformers_is_true() -> None:
    from transformers import CONFIG_MAPPING
    from transformers.activations import ACT2FN

    assert {*USUAL_ACTIVATIONS} <= ACT2FN.keys()
    assert {one for one in MODEL_TYPES if "head_dim" not in CONFIG_MAPPING[one].__annotations__} == FIXED_HEAD_DIM


@pytest.mark.parametrize("path", [*sorted(ROOT.glob("hparams*.json")), SMALL], ids=lambda path: path.stem)
def test_shipped_files_are_checked_without_transformers(path: Path) -> None:
    """Its import takes seconds."""
    code = f"import sys; from tplr import load_hparams; load_hparams({str(path)!r}); print({{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'pydantic'" in done.stdout
    assert "'transformers'" not in done.stdout
    assert "'torch'" not in done.stdout


def test_other_keys_reach_the_configuration(tmp_path: Path) -> None:
    model = json.loads(SMALL.read_text())["model"]
    more = {"model_type": "qwen3", "head_dim": 32, "rms_norm_eps": 1e-5, "attention_bias": True}
    config = load_hparams(written(tmp_path, model=model | more)).model_config_for_transformers()
    assert {name: getattr(config, name) for name in more} == more


def test_unknown_tokenizer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hparams = load_hparams(written(tmp_path, tokenizer_name="no-such-folder"))
    with pytest.raises(ConfigError, match="tokenizer_name 'no-such-folder'"):
        hparams.load_tokenizer(tmp_path)


def test_an_upgrade_changes_the_names_from_its_window_on(tmp_path: Path) -> None:
    changes = [{"window": 50, "spec_version": 2}, {"window": 80, "spec_version": 7}]
    version = load_hparams(written(tmp_path, upgrades=changes)).version
    assert [gradient_key(window, 3, version) for window in (49, 50, 80)] == [
        "gradient-49-3-v1.safetensors",
        "gradient-50-3-v2.safetensors",
        "gradient-80-3-v7.safetensors",
    ]
    assert start_window_key(version) == "start_window_v1.json"


@pytest.mark.parametrize("wrong", [[(50, 1)], [(50, 2), (50, 3)], [(50, 3), (60, 2)], [(60, 2), (50, 3)]])
def test_upgrades_must_ascend(tmp_path: Path, wrong: list[tuple[int, int]]) -> None:
    changes = [{"window": window, "spec_version": version} for window, version in wrong]
    with pytest.raises(ConfigError, match="upgrades: windows and spec_version must ascend"):
        load_hparams(written(tmp_path, upgrades=changes))


def test_a_strangers_key_does_not_command_the_terminal(tmp_path: Path) -> None:
    path = written(tmp_path, **{"a\x1b[31m": 1})
    with pytest.raises(ConfigError) as caught:
        load_hparams(path)
    assert caught.value.problems == (
        f"hparams: {path}: a\\x1b[31m is not a known key; remove it or correct its spelling",
    )
