"""``tplr eval`` on a finished run: held-out pages, a task from local files, each checkpoint once, and publishing."""

import asyncio
import contextlib
import json
import re
import socket
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from guides import from_guide

from tplr.config import Environment
from tplr.errors import ChainUnavailable, ConfigError, DataError, HubUnavailable, ObjectNotFound, StoreUnavailable
from tplr.localnet.reopen import open_finished
from tplr.node.network_reader import open_network
from tplr.run import evaluate, harness
from tplr.run.evaluate import EvaluationPlan, evaluate_window, follow
from tplr.run.harness import Tasks, run_tasks
from tplr.run.results import read_results
from tplr.schemas import EvaluationResult

TASKS = Path(__file__).parents[2] / "examples" / "tasks"


def test_the_newest_checkpoint_is_measured_once(newest, tplr, tmp_path, capsys, caplog, monkeypatch):
    recorded = newest
    measured = from_guide("docs/export.md", "tplr eval --local").arguments
    words = (*measured, "--results", "results", "--events", "events.jsonl")
    assert tplr(*words) == 0
    (result,) = read_results(tmp_path / "results")
    assert (result.window, result.digest) == (recorded.kept, recorded.digests[recorded.kept])
    assert result.command.startswith("tplr ")
    assert result.tools.keys() >= {"tplr", "torch", "transformers"}
    assert 1 < result.held_out.bits_per_byte < 20
    assert f"{result.held_out.bits_per_byte:.4f} bits per byte" in capsys.readouterr().out
    event = json.loads((tmp_path / "events.jsonl").read_text())
    assert (event["event"], event["window"]) == ("evaluation", recorded.kept)
    assert event["bits_per_byte"] == result.held_out.bits_per_byte
    # Again: from the folder, without the model.
    monkeypatch.delattr(evaluate, "loaded_state")
    assert tplr(*words) == 0
    assert read_results(tmp_path / "results") == [result]


def test_an_export_gives_the_same_loss_as_the_runs_model(recorded, tplr, tmp_path):
    assert tplr("export", "--local", recorded.folder, "--out", "model", "--window", "4") == 0
    assert tplr("eval", "model", "--local", recorded.folder, "--results", "of-folder") == 0
    assert tplr("eval", "--local", recorded.folder, "--window", "4", "--results", "of-run") == 0
    (one,), (other,) = (read_results(tmp_path / name) for name in ("of-folder", "of-run"))
    assert one.held_out == other.held_out
    assert one.digest == other.digest == recorded.digests[4]
    # Rounded weights are another model, so their result has a separate file.
    assert tplr("export", "--local", recorded.folder, "--out", "short", "--window", "4", "--dtype", "bfloat16") == 0
    for _ in range(2):
        assert tplr("eval", "short", "--local", recorded.folder, "--results", "of-run") == 0
    assert len({one.digest for one in read_results(tmp_path / "of-run")}) == 2
    assert len([*(tmp_path / "of-run").iterdir()]) == 2


def test_a_task_of_local_files(recorded, tplr, tmp_path, monkeypatch, capsys):
    """Without network access: the questions are in the project, and the harness's own tasks are not read."""
    pytest.importorskip("lm_eval")
    monkeypatch.chdir(TASKS.parents[1])  # the task's path is relative to it
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    words = from_guide("docs/export.md", "tplr eval --local --tasks tplr_arithmetic --include examples/tasks").arguments
    assert tplr(*words, "--local", recorded.folder, "--results", tmp_path / "results") == 0
    (result,) = read_results(tmp_path / "results")
    task = result.tasks["tplr_arithmetic"]
    assert (task.task_version, task.samples, task.fewshot) == ("1.0", 30, 0)
    assert 0 <= task.metrics["acc,none"] <= 1
    assert "lm-eval" in result.tools
    assert "tplr_arithmetic  acc,none" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        # The harness reads its own 14,000 definitions first.
        pytest.param(["--tasks", "none", "--include", TASKS], "no tasks named none", marks=pytest.mark.long),
        (["--tasks", "x", "--include", "nowhere"], "--include nowhere: no such folder"),
        (["--window", "99"], "window 99: expected one from 3"),
        (["nowhere"], "nowhere: no run.json: not a folder of tplr export"),
    ],
)
def test_wrong_arguments_are_one_error(recorded, tplr, tmp_path, caplog, monkeypatch, words, problem):
    monkeypatch.delattr(evaluate, "loaded_state")  # no model is loaded before
    assert tplr("eval", "--local", recorded.folder, "--results", "results", *words) == 2
    assert problem in caplog.text
    assert not (tmp_path / "results").exists()


def test_a_run_without_a_checkpoint_names_the_window_to_give(own_run, tplr, caplog):
    own_run.forget("checkpoint-")
    for words in (("eval",), ("generate", "def ")):
        caplog.clear()
        assert tplr(*words, "--local", own_run.folder) == 2
        assert (
            "has published no checkpoint of version 1: --window latest takes the newest window's model" in caplog.text
        )


async def test_a_result_belongs_to_one_run(recorded, tmp_path):
    """Two runs of one version may share a folder of results."""
    async with open_finished(recorded.folder) as network:
        for _ in range(2):
            await evaluate_window(network, recorded.last, plan(tmp_path))
        assert len([*tmp_path.iterdir()]) == 1
        other = replace(network, arguments=replace(network.arguments, netuid=4))
        await evaluate_window(other, recorded.last, plan(tmp_path))
    assert len([*tmp_path.iterdir()]) == 2


async def test_a_result_belongs_to_the_definitions_of_its_tasks(recorded, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "run_tasks", lambda *_, **__: {})
    include, results = tmp_path / "include", tmp_path / "results"
    include.mkdir()
    async with open_finished(recorded.folder) as network:
        for text, count in (("one", 1), ("one", 1), ("another", 2)):
            (include / "sums.yaml").write_text(text)
            await evaluate_window(network, recorded.last, plan(results, tasks=Tasks(("sums",), include, None)))
            assert len([*results.iterdir()]) == count


def test_tasks_without_the_extra_say_what_to_install(recorded, tplr, caplog, monkeypatch):
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(harness, "import_module", missing)
    monkeypatch.delattr(evaluate, "loaded_state")
    assert tplr("eval", "--local", recorded.folder, "--results", "results", "--tasks", "x") == 2
    assert "--tasks needs the extra: .venv/bin/pip install -e '.[eval]'" in caplog.text


@pytest.mark.parametrize("more", [(), ("--follow",)])
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--tasks", "sums,none"), "--tasks: no tasks named none"),
        (("--tasks", "sums", "--include", "nowhere"), "--include nowhere: no such folder"),
    ],
)
def test_tasks_are_checked_once_before_a_model_is_loaded(recorded, tplr, caplog, monkeypatch, words, problem, more):
    """Also with ``--follow``, which would fail again after each window."""
    every = SimpleNamespace(all_tasks=["sums"])
    monkeypatch.setattr(harness, "import_module", lambda _: SimpleNamespace(TaskManager=lambda **_: every))
    monkeypatch.delattr(evaluate, "loaded_state")
    assert tplr("eval", "--local", recorded.folder, *words, *more) == 2
    assert problem in caplog.text


@pytest.mark.parametrize("words", [("--limit", "-3"), ("--limit", "0"), ("--batch-size", "0")])
def test_counts_below_one_end_with_the_usage(recorded, tplr, capsys, words):
    with pytest.raises(SystemExit) as refused:
        tplr("eval", "--local", recorded.folder, *words)
    assert refused.value.code == 2
    assert f"{words[0]}: {words[1]}: expected a whole number from 1 on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConnectionError("no answer"), DataError),
        (FileNotFoundError("no such data set"), ConfigError),
        (KeyError("doc_to_text"), ConfigError),
    ],
)
def test_a_task_that_can_not_be_run_is_wrong_or_lacks_data_now(monkeypatch, error, kind):
    def failing(**_: object) -> None:
        raise error

    module = SimpleNamespace(simple_evaluate=failing, HFLM=lambda **_: None)
    monkeypatch.setattr(harness, "import_module", lambda _: module)
    loaded = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=8)), None
    with pytest.raises((ConfigError, DataError), match=f"--tasks sums: .*{error.args[0]}") as raised:
        run_tasks(loaded, Tasks(("sums",), None, None), limit=None, batch_size=1)
    assert raised.type is kind


def plan(results: Path, **changes) -> EvaluationPlan:
    values = {
        "tasks": None,
        "limit": None,
        "batch_size": 8,
        "precision": "float32",
        "command": "tplr eval",
        "results": results,
        "publish": False,
    }
    return EvaluationPlan(**values | changes)


async def test_following_evaluates_each_checkpoint_once(recorded, tmp_path):
    async with (
        open_finished(recorded.folder) as network,
        contextlib.aclosing(follow(network, plan(tmp_path))) as results,
        asyncio.timeout(60),
    ):
        assert (await anext(results)).window == recorded.kept
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await anext(results)
    assert len(read_results(tmp_path)) == 1


async def test_following_goes_on_after_a_hiccup(recorded, tmp_path, monkeypatch, caplog):
    """A failure of the chain, a bucket, or an evaluation's input: each is retried after the next window."""
    inputs = DataError("half a page"), HubUnavailable("no tokenizer")
    hiccups = [ChainUnavailable("no answer"), StoreUnavailable("503"), *inputs, None]

    async def windows():
        for _ in range(len(hiccups)):
            yield None

    def failing(call, kind):
        async def tried(*args, **more):
            if isinstance(hiccups[0], kind):
                raise hiccups.pop(0)
            return await call(*args, **more)

        return tried

    async with open_finished(recorded.folder) as network:
        monkeypatch.setattr(network.comms.clock, "ticks", windows)
        monkeypatch.setattr(network.comms, "refresh", failing(network.comms.refresh, ChainUnavailable))
        listed = failing(network.comms.leaders_checkpoints, StoreUnavailable)
        monkeypatch.setattr(network.comms, "leaders_checkpoints", listed)
        monkeypatch.setattr(evaluate, "evaluate_window", failing(evaluate_window, (DataError, HubUnavailable)))
        async with contextlib.aclosing(follow(network, plan(tmp_path))) as results:
            assert (await anext(results)).window == recorded.kept
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text for text in warnings if "checkpoints not listed" in text or "not evaluated" in text] == [
        "checkpoints not listed: no answer",
        "checkpoints not listed: 503",
        f"window {recorded.kept} not evaluated: half a page",
        f"window {recorded.kept} not evaluated: no tokenizer",
    ]


async def test_following_ends_if_the_evaluation_can_not_work(recorded, tmp_path, monkeypatch):
    async def refused(*_: object) -> None:
        raise ConfigError("--tasks sums: a wrong definition")

    monkeypatch.setattr(evaluate, "evaluate_window", refused)
    async with open_finished(recorded.folder) as network, asyncio.timeout(10):
        with pytest.raises(ConfigError, match="a wrong definition"):
            await anext(follow(network, plan(tmp_path)))


def served(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        return response.read().decode()


@pytest.mark.long
async def test_metrics_show_what_is_measured_beside_a_run(recorded, tmp_path):
    words = ["eval", "--local", str(recorded.folder), "--follow", "--results", str(tmp_path / "results")]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tplr.cli", *words, "--metrics-port", str(port), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(100):
            text = ""
            while "\ntplr_evaluation_bits_per_byte" not in text:
                await asyncio.sleep(0.2)
                with contextlib.suppress(OSError):
                    text = await asyncio.to_thread(served, port)
    finally:
        process.terminate()
        await process.wait()
    found = dict(re.findall(r"^(tplr_eval\w+) (\S+)$", text, re.MULTILINE))
    (result,) = read_results(tmp_path / "results")
    assert float(found["tplr_evaluated_window"]) == recorded.kept == result.window
    assert float(found["tplr_evaluation_bits_per_byte"]) == result.held_out.bits_per_byte


async def test_a_checkpoint_that_is_damaged_is_passed_over(own_run, tmp_path, caplog):
    await asyncio.to_thread(own_run.forget, "shard-00000-00000")
    async with open_finished(own_run.folder) as network:
        following = asyncio.ensure_future(anext(follow(network, plan(tmp_path))))
        async with asyncio.timeout(60):
            while "not evaluated" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        following.cancel()
        await asyncio.wait([following])
    assert f"window {own_run.kept} not evaluated" in caplog.text
    assert read_results(tmp_path) == []


async def test_a_result_is_published_in_the_own_bucket(own_run, tmp_path):
    async with open_finished(own_run.folder) as reader:
        with pytest.raises(ObjectNotFound):
            await reader.comms.get_evaluation(0, own_run.kept)
        variables = own_run.write_variables(reader.comms.get_bucket(0))
        writable = Environment({**reader.environment.variables, **variables})
        async with open_network(reader.arguments, writable, publishes=True) as network:
            asked = plan(tmp_path, publish=True)
            result = await evaluate_window(network, own_run.kept, asked)
            published = await network.comms.get_evaluation(0, own_run.kept)
    assert published == result.model_copy(update={"uid": 0}).sealed()


async def test_a_result_whose_publication_failed_is_published_the_next_time(own_run, tmp_path, monkeypatch):
    """It is not measured again, because its file exists."""
    published, put = [], [StoreUnavailable("503")]

    async def put_evaluation(result: EvaluationResult) -> None:
        if put:
            raise put.pop()
        published.append(result)

    async with open_finished(own_run.folder) as network:
        monkeypatch.setattr(network.comms, "put_evaluation", put_evaluation)
        asked = plan(tmp_path, publish=True)
        with pytest.raises(StoreUnavailable):
            await evaluate_window(network, own_run.kept, asked)
        monkeypatch.delattr(evaluate, "measure_held_out")
        result = await evaluate_window(network, own_run.kept, asked)
    assert published == [result]
