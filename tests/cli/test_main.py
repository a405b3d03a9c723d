"""The command line: its subcommands, their usage, and the exit status of a wrong command line."""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked_python import interpreter

from tplr.cli import COMMANDS, main
from tplr.cli.data import VERBS
from tplr.config import KINDS

SUBCOMMANDS = [[name] for name in COMMANDS] + [["data", verb] for verb in VERBS] + [["run", "init"]]


def ended(arguments, capsys):
    """Exit status, standard output and standard error of a command line that ends in the parser."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return end.value.code, *capsys.readouterr()


def test_the_version_is_the_packages(capsys):
    assert ended(["--version"], capsys) == (0, "tplr 0.1.0\n", "")


def test_the_package_runs_as_a_module(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tplr", "--version"])
    monkeypatch.delitem(sys.modules, "tplr.cli.__main__", raising=False)
    with pytest.raises(SystemExit) as end:
        runpy.run_module("tplr", run_name="__main__")
    assert (end.value.code, capsys.readouterr().out) == (0, "tplr 0.1.0\n")


def test_the_help_of_doctor_names_every_kind_of_bucket(capsys):
    assert ", ".join(KINDS) in " ".join(ended(["doctor", "--help"], capsys)[1].split())


def test_help_lists_every_subcommand(capsys):
    status, out, _ = ended(["--help"], capsys)
    assert status == 0
    assert out.startswith("usage: tplr [-h]")
    for name, (_, summary) in COMMANDS.items():
        assert name in out
        assert summary.split(",")[0][:40] in " ".join(out.split())


@pytest.mark.parametrize("command", SUBCOMMANDS, ids=" ".join)
def test_the_help_of_a_subcommand_names_it(command, capsys):
    status, out, _ = ended([*command, "--help"], capsys)
    assert status == 0
    assert out.startswith(f"usage: tplr {' '.join(command)} [-h]")


@pytest.mark.parametrize("command", [one for one in SUBCOMMANDS if one not in (["data"], ["run"])], ids=" ".join)
def test_a_wrong_option_shows_the_usage_of_its_subcommand(command, capsys):
    needed = {"explain": ["--window", "1", "--uid", "1"], "audit": ["--window", "1"]}
    needed |= {"make": ["out", "in"], "prepare": ["in", "-o", "out", "-c", "config", "--tokenizer", "folder"]}
    needed |= {"export": ["--out", "out"], "generate": ["prompt"], "replay": ["--from", "1", "--without-uid", "1"]}
    needed |= {"upload": ["folder"], "peek": ["url"], "bench": ["url", "--tokenizer", "folder"]}
    needed |= {"join": ["run.toml"], "init": ["--name", "a", "--netuid", "1"]}
    needed |= {"data page": ["--uid", "1", "--window", "1"]}
    status, _, told = ended(
        [*command, *needed.get(" ".join(command), needed.get(command[-1], [])), "--no-such-option"], capsys
    )
    assert status == 2
    assert told.startswith(f"usage: tplr {' '.join(command)} [-h]")
    assert f"tplr {' '.join(command)}: error: unrecognized arguments: --no-such-option" in told


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["--nonsense"], ["localnet", "--miners", "three"], ["data"]])
def test_a_wrong_command_line_ends_with_status_2(arguments, capsys):
    status, _, told = ended(arguments, capsys)
    assert status == 2
    assert told.startswith("usage: tplr")


def test_all_problems_of_a_localnet_are_reported_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["localnet", "--miners", "0", "--port", "70000"]) == 2
    told = capsys.readouterr().err
    assert "--miners 0" in told
    assert "--port 70000" in told
    assert list(tmp_path.iterdir()) == []


def test_help_imports_nothing_heavy():
    """One process shows the help of all commands; what one imports stays imported."""
    code = (
        "import json, sys, tplr.cli\n"
        "for words in json.load(sys.stdin):\n"
        "    try: tplr.cli.main([*words, '--help'])\n"
        "    except SystemExit as end: assert end.code == 0, words\n"
        "    heavy = {'torch', 'transformers', 'numpy', 'pyarrow', 'aiohttp'} & set(sys.modules)\n"
        "    assert not heavy, (words, heavy)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps([[], *SUBCOMMANDS]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: tplr") == len(SUBCOMMANDS) + 1


def test_an_error_that_needs_no_library_imports_none(tmp_path):
    """Imports of PyTorch and transformers take ten seconds and more; here they fail."""
    hparams = str(Path(__file__).parents[2] / "hparams-demo.json")
    cases = [
        (["localnet", "--miners", "0"], "--miners 0: expected"),
        (["join", "nofile.toml", "--ranks", "0", "--down", "nan"], "--ranks 0: expected"),
        (["join", "nofile.toml", "--ranks", "0", "--down", "nan"], "nofile.toml: No such file"),
        (["join", "nofile.toml", "--ranks", "0", "--down", "nan"], "--down nan: expected"),
        (["plan"], "no file hparams.json"),
        (["plan", "--mfu", "0", "--hparams", hparams], "--mfu 0.0: expected"),
        (["plan", "--gpu", "h100", "--mfu", "0", "--hparams", hparams], "--mfu 0.0: expected"),
        (["plan", "--gpu", "h1000", "--hparams", hparams], "--gpu h1000: expected here, cpu, rtx4090"),
        (["plan", "--loss-rows", "-5", "--hparams", hparams], "argument --loss-rows: -5: expected"),
        (["miner", "--ranks", "0"], "argument --ranks: 0: expected"),
        (["data", "peek", "a.jsonl", "--records", "-1"], "argument --records: -1: expected"),
        *((words, "nofile.toml: No such file") for words in readers("--run", "nofile.toml")),
        *((words, "has no localnet with kept buckets") for words in readers("--local", "nofolder")),
    ]
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "import json, tplr.cli\n"
        "for words in json.load(sys.stdin):\n"
        "    print('----', file=sys.stderr, flush=True)\n"
        "    try: status = tplr.cli.main(words)\n"
        "    except SystemExit as end: status = end.code\n"
        "    print('status', status, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps([words for words, _ in cases]),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    said = done.stderr.split("----\n")[1:]
    assert len(said) == len(cases), done.stderr
    for (words, problem), told in zip(cases, said, strict=True):
        assert problem in told, words
        assert told.endswith("status 2\n"), words
        assert "Traceback" not in told


def readers(option, value):
    """Command lines of all commands that read a network."""
    words = (["explain", "--uid", "1"], ["audit", "--window", "1"], ["watch", "--once"], ["page"], ["eval"])
    words = (
        *words,
        ["export", "--out", "out"],
        ["generate", "prompt"],
        ["replay", "--from", "1", "--without-uid", "1"],
    )
    return [[*one, option, value] for one in words]


def test_the_list_of_commands_imports_no_other_package():
    code = (
        "import sys; before = set(sys.modules); import tplr.cli\n"
        "try: tplr.cli.main(['--help'])\n"
        "finally: print({name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "{'tplr'}", done.stderr


@pytest.fixture
def many_records(tmp_path):
    """A file whose records, shown, exceed what a pipe holds."""
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(f'{{"text": "{"long " * 20} {number}"}}\n' for number in range(2000)))
    return path


@pytest.mark.parametrize(
    "arguments",
    [
        ("data", "peek", "FILE", "--samples", "1"),
        ("data", "peek", "FILE", "--samples", "2000"),
        pytest.param(("plan",), marks=pytest.mark.long),
    ],
)
def test_a_reader_that_ends_ends_the_command_in_silence(many_records, arguments):
    """Such as ``head``: with status 141, as a shell shows an end by SIGPIPE."""
    command = [*interpreter(), "-m", "tplr.cli", *(many_records if one == "FILE" else one for one in arguments)]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_node_that_an_error_ended_is_not_misconfigured(monkeypatch):
    """Status 2 would keep its service from starting it again."""
    monkeypatch.setattr("tplr.cli.node.run", no_reader)
    with pytest.raises(BrokenPipeError):
        main(["miner"])


def no_reader(_):
    read, write = os.pipe()
    os.close(read)
    try:
        os.write(write, b"x")
    finally:
        os.close(write)


# Reacts to Ctrl-C, although a shell makes its background jobs, such as these tests, ignore it.
INTERRUPTIBLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from tplr.cli import main
sys.exit(main())
"""


def test_ctrl_c_ends_a_command_without_a_traceback():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        url = f"http://127.0.0.1:{server.getsockname()[1]}/texts.jsonl"
        command = [*interpreter(), "-c", INTERRUPTIBLE, "data", "peek", url]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            connection, _ = server.accept()  # and no answer
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            try:
                _, told = process.communicate(timeout=30)
            finally:
                process.kill()
            connection.close()
    assert process.returncode == 130
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--disk", "inf"], "--disk inf: expected"),
        (["--host-memory", "inf"], "--host-memory inf: expected"),
        (["--block-time", "inf"], "--block-time inf: expected"),
        (["--ranks", "9" * 20], "--ranks 99999999999999999999: expected"),
        (["--picture", "/proc/nowhere/picture.svg"], "can't write /proc/nowhere/picture.svg"),
    ],
)
def test_what_a_plan_can_not_compute_or_write_is_one_line(options, problem, capsys):
    hparams = Path(__file__).parents[2] / "hparams-demo.json"
    try:
        status = main(["plan", "--hparams", str(hparams), "--gpu", "h100", *options])
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value"), [("rope_parameters", {"rope_type": "foo"}), ("rms_norm_eps", "abc"), ("hidden_act", ["silu"])]
)
def test_a_plan_of_a_model_that_can_not_be_built_is_one_line(tmp_path, capsys, key, value):
    raw = json.loads((Path(__file__).parents[2] / "hparams-demo.json").read_text())
    raw["model"] |= {key: value}
    path = tmp_path / "hparams.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(SystemExit) as end:
        main(["plan", "--hparams", str(path), "--gpu", "h100"])
    assert end.value.code == 2
    assert f"tplr plan: error: hparams: {path}: model.{key} is {value!r}" in capsys.readouterr().err
