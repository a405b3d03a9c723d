"""``tplr doctor`` with valid and invalid settings against a real server: output and exit status."""

import asyncio
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tplr import doctor
from tplr.cli import main
from tplr.config import Environment, Kind
from tplr.doctor import Report
from tplr.localnet.accounts import bucket_variables, key_table, new_account
from tplr.localnet.plan import scheme_constants
from tplr.storage import S3Connections, probe, probe_damage
from tplr.storage.probe import ProbeResult, clock_offset
from tplr.testing.s3server import Delay, IgnoreDigests, LoseResponse, Server, Status, serve
from tplr.testing.s3server.faults import Action

GRADIENTS, DATASET = new_account(), new_account("texts")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[tuple[Server, dict[str, str]]]:
    async with serve(tmp_path / "server", key_table([GRADIENTS, DATASET])) as server:
        env = (
            {"TPLR_S3_ENDPOINT": server.endpoint}
            | bucket_variables("gradients", GRADIENTS, "read", "write")
            | bucket_variables("dataset", DATASET, "read")
        )
        yield server, env


async def examine(kinds: list[Kind], env: dict[str, str]) -> tuple[list[Report], bool]:
    """Return the reports, and whether all settings are complete."""
    reports = await doctor.examine(kinds, Environment(env))
    return reports, all(report.configured for report in reports)


def verdicts(report: Report) -> dict[str, ProbeResult]:
    return {finding.check: finding.verdict for finding in report.findings}


def text(report: Report) -> str:
    return "\n".join(f"{finding.check}: {finding.found}: {finding.remedy}" for finding in report.findings)


async def check_empty(server: Server) -> None:
    async with S3Connections(server.endpoint) as connections:
        store = connections.store(GRADIENTS.writable)
        assert await store.list() == await store.multipart.unfinished() == []


async def test_a_healthy_bucket_and_nothing_left_in_it(world) -> None:
    server, env = world
    (report,), whole = await examine(["gradients"], env)
    assert whole
    assert report.title == f"gradients bucket {GRADIENTS.name} at {server.endpoint}"
    assert verdicts(report) == dict.fromkeys(
        [
            "write key",
            "read key",
            "read key is read-only",
            "commitment",
            "damaged uploads",
            "latency",
            "clock",
            "upload",
            "download",
        ],
        ProbeResult.OK,
    )
    await check_empty(server)
    assert re.search(r"download: 8.0 MiB at [0-9.]+ MiB/s", text(report))


async def test_a_bucket_without_a_write_key_is_only_read(world) -> None:
    server, env = world
    (report,), whole = await examine(["dataset"], env)
    assert whole
    assert set(verdicts(report)) == {"read key", "read key is read-only", "latency"}
    async with S3Connections(server.endpoint) as connections:
        await connections.store(DATASET.writable).put("shard", bytes(2**20))
    (report,), _ = await examine(["dataset"], env)
    assert "download: 1.0 MiB at" in text(report)


async def test_a_slow_bucket_is_a_warning(world, monkeypatch: pytest.MonkeyPatch) -> None:
    _, env = world
    monkeypatch.setattr(probe, "SLOW_BYTES_PER_SECOND", 1e15)
    (report,), _ = await examine(["gradients"], env)
    assert verdicts(report)["upload"] is verdicts(report)["download"] is ProbeResult.WARNING


async def test_a_store_that_fails_in_between(world) -> None:
    server, env = world
    server.faults.add("^HEAD", Status(503, "SlowDown"))
    (report,), _ = await examine(["gradients"], env)
    assert verdicts(report)["speed"] is ProbeResult.PROBLEM
    assert "(503" in text(report)


@pytest.mark.parametrize(
    ("requests", "taken"),
    [
        ("^PUT ", ["object by Content-MD5", "object by signed SHA-256", "part by signed SHA-256"]),
        ("^PUT .*-1$", ["object by Content-MD5"]),
        ("^PUT .*partNumber", ["part by signed SHA-256"]),
    ],
)
async def test_a_bucket_that_takes_what_arrives_damaged(world, requests: str, taken: list[str]) -> None:
    server, env = world
    server.faults.add(requests, IgnoreDigests(), times=None)
    (report,), _ = await examine(["gradients"], env)
    assert verdicts(report)["damaged uploads"] is ProbeResult.WARNING
    assert re.findall("([a-zA-Z][a-zA-Z0-9 -]*): accepted", text(report).replace("damaged uploads: ", "")) == taken
    assert "use an https endpoint" in text(report)
    await check_empty(server)


@pytest.mark.parametrize(
    ("requests", "fault", "found"),
    [
        ("^PUT .*-2$", Status(503, "SlowDown"), "unknown: object by signed SHA-256"),
        ("^PUT .*partNumber", Status(400, "BadRequest"), "nodes do not know: part by signed SHA-256"),
        ("^POST .*uploads", LoseResponse(), "unknown: part by signed SHA-256"),
    ],
)
async def test_other_answers_to_a_damaged_upload(world, requests: str, fault: Action, found: str) -> None:
    server, env = world
    server.faults.add(requests, fault, times=None)
    server.faults.add("^DELETE .*-2$", Status(503, "SlowDown"))  # it is removed nevertheless
    (report,), _ = await examine(["gradients"], env)
    assert verdicts(report)["damaged uploads"] is ProbeResult.WARNING
    assert found in text(report)
    await check_empty(server)


async def test_who_is_interrupted_leaves_nothing_and_what_can_not_be_removed_is_named(
    world, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = world
    server.faults.add("^PUT .*-[12]$", IgnoreDigests(), times=None)
    hangs = server.faults.add("^PUT .*partNumber", Delay(60))
    async with S3Connections(server.endpoint) as connections:
        probing = asyncio.create_task(probe_damage.probe_damage(connections.store(GRADIENTS.writable)))
        while hangs.left:  # noqa: ASYNC110 - a server tells nobody what reaches it
            await asyncio.sleep(0.01)
        probing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await probing
        await check_empty(server)
        monkeypatch.setattr(probe_damage, "TIDY_SECONDS", 0.1)
        server.faults.add("^DELETE", Status(503, "SlowDown"), times=None)
        *_, finding = await probe_damage.probe_damage(connections.store(GRADIENTS.writable))
    assert re.search("probe-[0-9a-f]{16}-. may still be there", finding.found)


async def test_a_read_key_that_writes_goes_on_no_chain_and_is_a_warning_elsewhere(world) -> None:
    _, env = world
    for kind, account in (("GRADIENTS", GRADIENTS), ("DATASET", DATASET)):
        env[f"R2_{kind}_READ_ACCESS_KEY_ID"] = account.writable.access_key_id
        env[f"R2_{kind}_READ_SECRET_ACCESS_KEY"] = account.writable.secret_access_key
    (gradients, dataset), _ = await examine(["gradients", "dataset"], env)
    assert verdicts(gradients)["read key is read-only"] is ProbeResult.PROBLEM
    assert "the chain would publish it" in text(gradients)
    assert "R2_GRADIENTS_READ_*" in text(gradients)
    assert verdicts(dataset)["read key is read-only"] is ProbeResult.WARNING
    assert "latency" in verdicts(dataset)


async def test_a_write_key_that_can_not_write(world) -> None:
    _, env = world
    env["R2_GRADIENTS_WRITE_ACCESS_KEY_ID"] = GRADIENTS.readable.access_key_id
    env["R2_GRADIENTS_WRITE_SECRET_ACCESS_KEY"] = GRADIENTS.readable.secret_access_key
    (report,), _ = await examine(["gradients"], env)
    assert verdicts(report)["write key"] is ProbeResult.PROBLEM
    assert verdicts(report)["read key"] is ProbeResult.OK
    assert "check R2_GRADIENTS_WRITE_*" in text(report)
    assert "latency" not in verdicts(report)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("R2_GRADIENTS_READ_SECRET_ACCESS_KEY", "0" * 64, "the read key can't read"),
        ("R2_GRADIENTS_WRITE_SECRET_ACCESS_KEY", "0" * 64, "the write key can't write"),
        ("R2_GRADIENTS_BUCKET_NAME", "another", "no such bucket"),
    ],
)
async def test_wrong_settings_are_told_without_their_secrets(world, name: str, value: str, expected: str) -> None:
    _, env = world
    (report,), whole = await examine(["gradients"], env | {name: value})
    assert whole
    assert ProbeResult.PROBLEM in verdicts(report).values()
    assert expected in text(report)
    assert ("the secret may be wrong" in text(report)) == name.endswith("_SECRET_ACCESS_KEY")
    for secret in (value if len(value) == 64 else "no secret", env["R2_GRADIENTS_READ_SECRET_ACCESS_KEY"]):
        assert secret not in text(report)


async def test_settings_that_are_missing_are_all_named(world) -> None:
    _, env = world
    reports, whole = await examine(["gradients", "aggregator"], env)
    assert not whole
    assert verdicts(reports[0])["latency"] is ProbeResult.OK
    assert "R2_AGGREGATOR_BUCKET_NAME is missing" in text(reports[1])
    assert "ACCOUNT_ID" not in text(reports[1])  # not needed with a custom endpoint
    assert "R2_AGGREGATOR_READ_SECRET_ACCESS_KEY is missing" in text(reports[1])


async def test_every_replica_of_the_dataset_is_tried(world) -> None:
    _, env = world
    good = {
        "account_id": DATASET.readable.account_id,
        "name": "texts",
        "credentials": {
            "read": {
                "access_key_id": DATASET.readable.access_key_id,
                "secret_access_key": DATASET.readable.secret_access_key,
            }
        },
    }
    env = {"TPLR_S3_ENDPOINT": env["TPLR_S3_ENDPOINT"]} | {
        "R2_DATASET_BUCKET_LIST": json.dumps([good, good | {"name": "missing"}])
    }
    (first, second), whole = await examine(["dataset"], env)
    assert whole
    assert ProbeResult.PROBLEM not in verdicts(first).values()
    assert "no such bucket" in text(second)


@pytest.mark.parametrize(("seconds", "verdict"), [(60, ProbeResult.WARNING), (-400, ProbeResult.PROBLEM)])
async def test_a_clock_that_is_off(
    world, monkeypatch: pytest.MonkeyPatch, seconds: float, verdict: ProbeResult
) -> None:
    _, env = world
    wrong = SimpleNamespace(time=lambda: time.time() + seconds, perf_counter=time.perf_counter)
    monkeypatch.setattr(probe, "time", wrong)
    (report,), _ = await examine(["gradients"], env)
    assert verdicts(report)["clock"] is verdict
    assert re.search(r"clock is [+-](5[89]|60|399|400) s off", text(report))


@pytest.mark.parametrize(
    ("before", "stamp", "after", "offset"),
    [(100.2, 100.0, 100.4, 0.0), (100.9, 101.0, 101.1, 0.0), (110.0, 100.0, 110.5, 9.0), (90.0, 100.0, 90.5, -9.5)],
)
def test_an_offset_is_what_is_certain(before: float, stamp: float, after: float, offset: float) -> None:
    assert clock_offset(before, stamp, after) == offset


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """``run(env, *arguments)`` gives exit status and output of ``tplr doctor``."""

    def run(env: dict[str, str], *arguments: str) -> tuple[int, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("COLUMNS", "200")
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        # A missing chain file, because no test contacts a public network.
        status = main(["doctor", *arguments, "--subtensor.network", "local:none"])
        return status, capsys.readouterr().out

    return run


def test_the_exit_status_of_missing_settings_and_wrong_arguments(run) -> None:
    status, output = run({})
    assert status == 2
    assert "R2_GRADIENTS_ACCOUNT_ID is missing" in output
    assert run({}, "gradiants")[0] == 2
    status, output = run({"TPLR_S3_ENDPOINT": "nonsense", "TPLR_TRANSFERS": "many"})
    assert status == 2
    # It hides no other problem.
    for found in ("TPLR_S3_ENDPOINT: expected http", "hparams: no file hparams.json", "TPLR_TRANSFERS is 'many'"):
        assert found in output


def test_wrong_settings_of_tls_are_no_outage(run) -> None:
    status, output = run({"AWS_CA_BUNDLE": "/nofile", "HTTPS_PROXY": "http://me:PW@host:abc"})
    assert status == 2
    assert output.count("HTTPS_PROXY: expected http://") == output.count("AWS_CA_BUNDLE is '/nofile': expected") == 1
    assert "PW" not in output


def test_an_aggregator_needs_no_bucket_of_a_miner(run) -> None:
    _, output = run({}, "--role", "aggregator")
    assert output.count("R2_AGGREGATOR_BUCKET_NAME is missing") == 1  # and not again in the table of the node
    assert "R2_GRADIENTS" not in output
    _, output = run({}, "--role", "validator")
    assert "R2_GRADIENTS_BUCKET_NAME is missing" in output
    assert "R2_AGGREGATOR" not in output


@pytest.mark.parametrize("role", ["miner", "aggregator"])
def test_a_model_that_can_not_be_built_is_a_problem_of_the_hparams(run, tmp_path: Path, role: str) -> None:
    raw = scheme_constants("demo")
    raw["model"] |= {"rope_parameters": {"rope_type": "foo"}}
    (tmp_path / "hparams.json").write_text(json.dumps(raw))
    status, output = run({}, "--role", role, "--device", "cpu")
    assert status == 2
    assert "hparams: hparams.json: model.rope_parameters is {'rope_type': 'foo'}: expected as LlamaConfig" in output


def test_the_exit_status_of_a_server_that_is_not_there(run) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        env = {"TPLR_S3_ENDPOINT": f"http://127.0.0.1:{unused.getsockname()[1]}"}
        status, output = run(env | bucket_variables("gradients", GRADIENTS, "read", "write"))
    assert status == 1
    assert "the write key can't write" in output
    assert "the server or the network is down" in " ".join(output.split())
    assert "secret may be wrong" not in output
    assert GRADIENTS.writable.secret_access_key not in output


async def test_the_exit_status_of_health(world, run) -> None:
    _, env = world
    status, output = await asyncio.to_thread(run, env, "gradients", "dataset")
    assert status == 0
    assert "dataset bucket texts at" in output
    # An empty setting counts as not set: that bucket is not tried. This folder has nothing that a node needs.
    status, output = await asyncio.to_thread(run, env | {"R2_AGGREGATOR_ACCOUNT_ID": "", "TPLR_TRANSFER": "9"})
    assert status == 1
    assert "aggregator bucket" not in output
    for found in ("hparams: no file hparams.json", "unknown variable TPLR_TRANSFER", "did you mean TPLR_TRANSFERS?"):
        assert found in output


async def test_a_file_of_keys_that_other_users_can_read_is_a_warning(world, run, tmp_path: Path) -> None:
    _, env = world
    file = tmp_path / ".env"
    file.write_text("".join(f"{name}={value}\n" for name, value in env.items()))
    file.chmod(0o644)  # as ``cp .env.example .env`` leaves it
    status, output = await asyncio.to_thread(run, {}, "dataset")
    assert status == 0
    assert f"chmod 600 {file}" in output.replace("\n", "")
    file.chmod(0o600)
    assert "chmod" not in (await asyncio.to_thread(run, {}, "dataset"))[1]
    file.write_text("TPLR_TRANSFERS=4\n")
    file.chmod(0o644)
    assert "chmod" not in (await asyncio.to_thread(run, {}, "dataset"))[1]


async def test_a_bucket_that_can_t_be_committed_on_chain_is_a_problem(world) -> None:
    _, env = world
    long = env | {f"R2_GRADIENTS_READ_{half}": "k" * 100 for half in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY")}
    (report,), _ = await examine(["gradients"], long)
    assert verdicts(report)["commitment"] is ProbeResult.PROBLEM
