"""A plan refuses what cannot fit, and ``tplr plan`` shows it."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from guides import all_of_guide
from guides import words as words_of

from tplr.cli import main
from tplr.errors import ConfigError
from tplr.hparams import load_hparams
from tplr.planner.host import GIB, known_accelerator
from tplr.planner.plan import SNAPSHOTS, make_plan
from tplr.training.device import DeviceSettings

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "plan.md"
CUDA_OFFLOADED = DeviceSettings.of("cuda", checkpointing="full", offload_weights=True, offload_error_feedback=True)
OFFLOADED = DeviceSettings(checkpointing="full", offload_weights=True, offload_error_feedback=True)


def test_the_shipped_runs_fit_one_h200(demo, sparseloco, default, host):
    for hparams in (demo, sparseloco, default):
        plan = make_plan(hparams, host())
        assert plan.problems == []
        plan.check()


@pytest.mark.parametrize(
    ("name", "gpu", "settings"),
    [("hparams-8b.json", "h200", DeviceSettings.of("cuda")), ("hparams-70b.json", "b200", CUDA_OFFLOADED)],
)
def test_the_large_runs_fit_eight_gpus_and_train_all_their_tokens(name, gpu, settings, host):
    """With the default links: memory, disk, and a window that is long enough for its batches and no longer."""
    machine = host(gpu, ranks=8, host_memory=2048 * GIB, disk=4000 * GIB)
    plan = make_plan(load_hparams(ROOT / name), machine, settings=settings)
    assert plan.problems == []
    assert make_plan(load_hparams(ROOT / name), machine, role="validator", settings=settings).memory_problems == []
    line = plan.timeline
    idle = sum(phase.seconds for phase in line.phases if phase.name == "idle")
    assert line.binds.startswith("data")
    assert idle < 0.1 * line.window


@pytest.mark.parametrize(("name", "gpu"), [("hparams-8b.json", "h200"), ("hparams-70b.json", "b200")])
@pytest.mark.parametrize("peers", [15, 20])
def test_the_large_runs_train_99_percent_of_a_window_with_overlap_only(name, gpu, peers, host):
    machine = host(gpu, ranks=8, host_memory=2048 * GIB, disk=4000 * GIB)

    def utilisation(outer_delay: int) -> float:
        hparams = load_hparams(ROOT / name).model_copy(update={"max_topk_peers": peers, "outer_delay": outer_delay})
        return make_plan(hparams, machine, settings=CUDA_OFFLOADED).timeline.utilisation

    assert utilisation(1) >= 0.99
    assert utilisation(0) < 0.75


def test_muon_needs_less_memory_and_more_time_than_adamw(default, host):
    constants = default.sparseloco.model_copy(update={"inner_optimizer": "adamw", "muon_momentum": None})
    muon, adamw = (make_plan(one, host()) for one in (default, default.model_copy(update={"sparseloco": constants})))
    hidden = sum(size for name, size in muon.load.tensors.items() if ".layers." in name and "norm" not in name)
    assert adamw.memory.device["moments"] - muon.memory.device["moments"] == 4 * hidden
    assert adamw.disk - muon.disk == SNAPSHOTS * 4 * hidden
    assert 1.01 * adamw.timeline.needed < muon.timeline.needed < 1.1 * adamw.timeline.needed


def test_what_does_not_fit_is_refused_with_remedies(sparseloco, host):
    plan = make_plan(sparseloco, host("rtx4090"))
    with pytest.raises(ConfigError, match=r"24\.0 GiB can be used") as refused:
        plan.check()
    assert "activation checkpointing, offload" in str(refused.value)
    make_plan(
        sparseloco,
        host("rtx4090", ranks=4),
        settings=OFFLOADED,
    ).check()


def test_all_problems_at_once(sparseloco, host):
    plan = make_plan(sparseloco, host("rtx4090", disk=GIB, host_memory=GIB, up=1e6))
    text = "\n".join(plan.problems)
    assert all(word in text for word in ("each of 1 ranks", "the host needs", "the disk has", "Mbit/s, time"))


def test_on_a_cpu_the_hosts_memory_counts(sparseloco, host):
    make_plan(sparseloco, host(None)).check()
    with pytest.raises(ConfigError, match="the host needs"):
        make_plan(sparseloco, host(None, host_memory=16 * GIB)).check()


def test_command(capsys, tmp_path, demo):
    picture = tmp_path / "window.svg"
    status = main(["plan", "--gpu", "h200", "--host-memory", "256", "--disk", "1000", "--picture", str(picture)])
    shown = capsys.readouterr().out
    assert status == 0
    for words in ("error feedback", "peak, checkpointing full", "utilisation", "class B requests", "binds"):
        assert words in shown
    drawn = ET.fromstring(picture.read_text())
    assert any("train" in (one.text or "") for one in drawn.iter("{http://www.w3.org/2000/svg}text"))


def test_command_for_a_validator_shows_no_training_and_judges_its_links(capsys, tmp_path):
    picture = tmp_path / "window.svg"
    words = ["plan", "--role", "validator", "--gpu", "h100", "--host-memory", "256", "--disk", "1000"]
    assert main([*words, "--up", "3", "--picture", str(picture)]) == 0  # an update would take 77 s of 60
    shown = capsys.readouterr().out
    assert not [word for word in ("training", "utilisation", "binds", "idle", "does not fit") if word in shown]
    drawn = ET.fromstring(picture.read_text())
    names = {one.text for one in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert {"upload", "download"} <= names
    assert "devices" not in names
    assert main([*words, "--up", "2"]) == 1
    assert "does not fit: the upload of 476 MB in a window takes 1906 s" in " ".join(capsys.readouterr().out.split())


def test_command_exits_1_if_it_does_not_fit(capsys):
    assert main(["plan", "--gpu", "rtx4090", "--host-memory", "64", "--disk", "1000", "--up", "1"]) == 1
    assert "does not fit" in capsys.readouterr().out


def test_all_wrong_arguments_at_once(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--gpu", "abacus", "--ranks", "0", "--up", "-1"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert all(word in said for word in ("usage: tplr plan", "abacus", "--ranks 0", "--up -1"))


@pytest.mark.parametrize("command", all_of_guide("docs/plan.md"))
def test_the_commands_of_the_guide_run(command, capsys, tmp_path, monkeypatch):
    for path in ROOT.glob("hparams*.json"):
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "FILE").symlink_to(ROOT / "hparams-sparseloco.json")
    monkeypatch.chdir(tmp_path)
    assert main(words_of(command)[1:]) in (0, 1)
    assert "peak" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("driver", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA L40S-48Q", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA RTX A1000", None),
    ],
)
def test_accelerators_are_known_by_their_drivers_names(driver, expected):
    found = known_accelerator(driver)
    assert (found and found.name) == expected
