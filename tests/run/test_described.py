"""``--run run.toml``: a reader without any configuration reads a run with a published description."""

import asyncio
import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from tplr.join.description import DatasetBucket, HparamsFile, PublicBucket, RunDescription, hparams_digest
from tplr.localnet.dataset import SUBFOLDER
from tplr.localnet.network import NETUID
from tplr.run.record import read_record
from tplr.testing.s3server import serve


@pytest.fixture
def endpoint() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{found.getsockname()[1]}"


@pytest.fixture
def description(recorded, endpoint, tmp_path) -> Path:
    folder = tmp_path / "published"
    folder.mkdir()
    shutil.copy(recorded.folder / "hparams.json", folder)
    shutil.copytree(recorded.folder / "tokenizer", folder / "tokenizer")
    table = json.loads((recorded.folder / "keys.json").read_text())

    def bucket(name: str) -> dict[str, Any]:
        key = next(key for key, entry in table.items() if entry["buckets"].get(name) == "read")
        return {"bucket_name": name, "read_access_key_id": key, "read_secret_access_key": table[key]["secret"]}

    run = RunDescription(
        format=1,
        name="toy",
        netuid=NETUID,
        network=f"local:{recorded.folder / 'chain.sqlite'}",
        s3_endpoint=endpoint,
        hparams=HparamsFile(file="hparams.json", sha256=hparams_digest(folder / "hparams.json")),
        dataset=DatasetBucket(**bucket("dataset"), subfolder=SUBFOLDER),
        aggregator=PublicBucket(**bucket("aggregator")),
    )
    (folder / "run.toml").write_text(run.to_toml())
    return folder / "run.toml"


async def served(recorded, endpoint: str, work) -> object:
    table = json.loads((recorded.folder / "keys.json").read_text())
    async with serve(recorded.folder / "storage", table, port=int(endpoint.rpartition(":")[2])):
        return await asyncio.to_thread(work)


def test_commands_read_the_run_that_a_description_names(
    recorded, endpoint, description, tplr, tmp_path, capsys
) -> None:
    def read() -> list[int]:
        return [
            tplr("export", "--run", description, "--out", "model", "--netuid", 77),
            tplr("explain", "--run", description, "--uid", 1),
            tplr("page", "--run", description, "--out", "page.html"),
        ]

    assert asyncio.run(served(recorded, endpoint, read)) == [0, 0, 0]
    assert read_record(tmp_path / "model").digest == recorded.digests[recorded.last]
    said = capsys.readouterr().out
    assert f"uid 1 ({recorded.hotkey(1)}) in window 7" in said
    assert (tmp_path / "page.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--run", "nowhere.toml"), "nowhere.toml: No such file"),
        (("--run", "run.toml", "--local"), "give --local or --run, not both"),
    ],
)
def test_a_description_that_is_none_is_one_error(tplr, capsys, words, complaint) -> None:
    for command in (("export", "--out", "model"), ("explain", "--uid", 1), ("page",)):
        with pytest.raises(SystemExit) as ended:
            tplr(*command, *words)
        assert ended.value.code == 2
        assert complaint in capsys.readouterr().err
