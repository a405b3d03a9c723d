"""``tplr export --verify``: an honest folder agrees; one changed byte, number or word is named."""

import json
import shutil

import pytest
from safetensors.torch import load_file

from tplr.cli import main
from tplr.exchange.snapshot import TensorLayout
from tplr.hparams import load_hparams
from tplr.run.card import CARD, render_card
from tplr.run.folder import HPARAMS, file_hashes
from tplr.run.record import RECORD, ExportRecord, read_record
from tplr.run.weights import INDEX, SINGLE_FILE, write_weights
from tplr.schemas import TaskResult


@pytest.fixture(scope="module")
def exported_once(recorded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tplr.cli.reported.setup_logging", lambda **_: None)  # would outlive the test
        assert main(["export", "--local", str(recorded.folder), "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def exported(exported_once, tmp_path):
    """A copy that a test may change."""
    shutil.copytree(exported_once, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def verified(recorded, tplr, capsys):
    """Return status and findings of a check."""

    def verify(folder, run=recorded):
        status = tplr("export", "--local", run.folder, "--verify", folder)
        return status, capsys.readouterr().out.splitlines()

    return verify


def rewrite(folder, **changes):
    """Write a record that is sealed again, and its card."""
    record = read_record(folder).model_copy(update=changes).sealed()
    (folder / RECORD).write_text(record.model_dump_json(indent=1))
    (folder / CARD).write_text(render_card(record, load_hparams(folder / HPARAMS)))
    return record


def test_an_honest_folder_agrees(exported, verified, recorded, tplr, tmp_path):
    assert verified(exported) == (0, [f"AGREES: {exported}, window {recorded.last}: files, weights, facts and card"])
    assert tplr("export", "--local", recorded.folder, "--out", "short", "--dtype", "bfloat16", "--window", "5") == 0
    assert verified(tmp_path / "short")[0] == 0


def test_a_changed_file_a_missing_one_and_one_more_are_named(exported, verified):
    weights = exported / SINGLE_FILE
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    (exported / "more").write_text("more")
    (exported / "tokenizer.json").unlink()
    status, found = verified(exported)
    assert status == 1
    assert [line.split(":")[1].strip() for line in found] == [SINGLE_FILE, "tokenizer.json", "more"]


def test_other_weights_with_their_own_hashes_are_found(exported, verified):
    """A changed tensor can be hashed, but is not the network's."""
    weights = exported / SINGLE_FILE
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    files = {name: found for name, found in file_hashes(exported).items() if name not in (RECORD, CARD)}
    rewrite(exported, files=files)
    status, found = verified(exported)
    assert (status, len(found)) == (1, 1)
    assert f"{SINGLE_FILE}: model.norm.weight is not the run's tensor after window 7" in found[0]


def test_a_strangers_file_name_does_not_command_the_terminal(exported, verified):
    (exported / "more\x1b[31m").write_text("more")
    assert verified(exported) == (1, ["DIFFERS: more\\x1b[31m: not named in run.json"])


def hashed_again(folder):
    """Let the record name the folder's files as they are."""
    rewrite(folder, files={name: found for name, found in file_hashes(folder).items() if name not in (RECORD, CARD)})


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


CHANGES = {
    "config.json": lambda path: edit(path, rms_norm_eps=0.1),
    "generation_config.json": lambda path: edit(path, eos_token_id=7),
    "tokenizer.json": lambda path: edit(path, pre_tokenizer=None),
    "tokenizer_config.json": lambda path: path.write_text("{"),
    HPARAMS: lambda path: edit(path, init_seed=7),
    "model.py": lambda path: path.write_text("import os"),
    INDEX: lambda path: path.write_text('{"weight_map": {}}'),
}


@pytest.mark.parametrize(
    "changes",
    [
        CHANGES,
        {
            "config.json": lambda path: edit(path, auto_map={"AutoModelForCausalLM": "model.Model"}),
            "model-1.safetensors": lambda path: (path.parent / SINGLE_FILE).rename(path),
        },
    ],
    ids=["each file", "names"],
)
def test_other_settings_with_their_own_hashes_are_found(exported, verified, changes):
    """A folder with the run's tensors may still compute something else."""
    for name, change in changes.items():
        change(exported / name)
    hashed_again(exported)
    status, found = verified(exported)
    assert status == 1
    assert all(line.startswith("DIFFERS: ") for line in found)
    assert {line.split(": ")[1] for line in found} == {*changes}


def test_settings_of_another_version_are_named_and_no_difference(exported, verified):
    edit(exported / "config.json", transformers_version="5.0.0", a_new_default=1)
    hashed_again(exported)
    status, found = verified(exported)
    assert status == 0
    assert found[0].startswith("NOT CHECKED: config.json: ")


def test_the_index_of_several_files_is_checked(exported, verified):
    tensors = load_file(exported / SINGLE_FILE)
    (exported / SINGLE_FILE).unlink()
    layouts = {name: TensorLayout.of(one) for name, one in tensors.items()}
    first, *_ = write_weights(exported, tensors, layouts, max_bytes=50_000)
    hashed_again(exported)
    assert verified(exported)[0] == 0
    index = json.loads((exported / INDEX).read_text())
    edit(exported / INDEX, weight_map=index["weight_map"] | {"model.norm.weight": first})
    hashed_again(exported)
    assert verified(exported) == (1, [f"DIFFERS: {INDEX}: does not name the file of each tensor"])


def test_each_lie_is_named(exported, verified):
    rewrite(exported, global_step=99, dataset="0" * 64, digest="0" * 64)
    status, found = verified(exported)
    assert status == 1
    for lie in (
        "global_step: the folder says 99, found 5",
        "dataset: the folder says 0000",
        "digest: the folder says 0",
    ):
        assert [line.startswith(f"DIFFERS: {lie}") for line in found].count(True) == 1, found


def test_lies_on_windows_and_contributors_are_named(exported, verified):
    record = read_record(exported)
    windows = list(record.windows)
    windows[0] = windows[0].model_copy(update={"held_out_loss": 1.0, "batches": {"1": 7, "2": 1}})
    contributors = (record.contributors[0].model_copy(update={"credit": 1.0}), *record.contributors[1:])
    rewrite(exported, windows=tuple(windows), contributors=contributors)
    _, found = verified(exported)
    assert "DIFFERS: window 3: held-out loss: the folder says 1.0, found 5.7" in found
    assert "DIFFERS: window 3: batches of uid 1: the folder says 7, found 1" in found
    rewrite(exported, windows=record.windows, contributors=contributors)
    _, found = verified(exported)
    assert [line.split(":")[1] for line in found] == [" contributor uid 1"]


def test_contributors_without_a_known_hotkey_are_compared_as_a_sum(exported, verified):
    """As in a folder whose exporter's chain node had dropped the state of the first two windows."""
    first, *others = read_record(exported).contributors
    half = {"windows": 2, "tokens": first.tokens * 2 // 5, "credit": None, "hotkey": ""}
    rest = first.model_copy(update={"windows": 3, "tokens": first.tokens * 3 // 5})
    rewrite(exported, contributors=(first.model_copy(update=half), rest, *others))
    status, found = verified(exported)
    assert (status, found[0].startswith("NOT CHECKED: contributor uid 1: its hotkeys: ")) == (0, True)
    rewrite(exported, contributors=(first.model_copy(update=half), first, *others))
    status, found = verified(exported)
    assert (status, found[0].startswith("DIFFERS: contributor uid 1: windows and tokens: ")) == (1, True)
    rewrite(exported, contributors=(first.model_copy(update={"hotkey": "", "credit": 9.0}), *others))
    assert verified(exported)[1][0] == "DIFFERS: contributor uid 1: credit: the folder says 9.0, found 0.25"


def test_a_result_is_measured_again(exported, verified, recorded, tplr, tmp_path, capsys):
    assert tplr("eval", "model", "--local", recorded.folder, "--results", "results") == 0
    assert tplr("export", "--local", recorded.folder, "--out", "with", "--results", "results") == 0
    capsys.readouterr()
    folder = tmp_path / "with"
    assert verified(folder)[0] == 0
    (result,) = read_record(folder).evaluations
    better = result.held_out.model_copy(update={"nats_per_token": result.held_out.nats_per_token - 0.01})
    task = TaskResult(task_version="1", fewshot=0, metrics={"acc": 1.0}, samples=2)
    rewrite(folder, evaluations=(result.model_copy(update={"held_out": better, "tasks": {"sums": task}}).sealed(),))
    status, found = verified(folder)
    assert status == 1
    assert found[0].startswith("DIFFERS: held-out loss of ")
    assert found[1].startswith("NOT CHECKED: tasks sums: run again ")


def test_a_card_that_says_more_is_named(exported, verified):
    with (exported / CARD).open("a") as card:
        card.write("The best model there is.\n")
    assert verified(exported) == (1, [f"DIFFERS: {CARD}: is not the card of {RECORD}"])


def test_what_is_deleted_is_not_a_difference(exported, verified, own_run):
    own_run.forget("scores-4")
    own_run.forget("debug-4")
    own_run.forget("aggregator-4")
    status, found = verified(exported, own_run)
    assert status == 0
    assert "NOT CHECKED: window 4: its reports are deleted" in found


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda folder: (folder / RECORD).unlink(), "no run.json: not a folder of tplr export"),
        (lambda folder: (folder / RECORD).write_text("{}"), "is not a valid ExportRecord"),
        (
            lambda folder: (folder / RECORD).write_text(
                (folder / RECORD).read_text().replace('"netuid": 3', '"netuid": 4')
            ),
            "its seal does not match, the file is torn or was changed",
        ),
    ],
)
def test_a_folder_that_is_none_is_one_error(exported, verified, caplog, damage, problem):
    damage(exported)
    assert verified(exported) == (2, [])
    assert problem in caplog.text


def test_a_folder_of_another_run_is_one_error(exported, verified, caplog):
    rewrite(exported, version="9")
    assert verified(exported) == (2, [])
    assert "of run 9, this network's is 1: give --hparams" in caplog.text


def test_a_record_is_json_that_others_read(exported):
    raw = json.loads((exported / RECORD).read_text())
    assert raw["window"] == ExportRecord.model_validate_json((exported / RECORD).read_bytes()).window
