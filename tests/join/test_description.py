"""``run.toml`` is read back as written; any other file is refused, with every problem named."""

import hashlib
import tomllib
from pathlib import Path

import pytest

from tplr.errors import ConfigError
from tplr.join.description import DatasetBucket, HparamsFile, PublicBucket, RunDescription, load_description

HPARAMS = b'{"spec_version": 1}'
BUCKET = {
    "account_id": "a" * 32,
    "bucket_name": "texts",
    "read_access_key_id": "b" * 32,
    "read_secret_access_key": "c" * 64,
}


@pytest.fixture
def run(tmp_path: Path) -> RunDescription:
    (tmp_path / "hparams.json").write_bytes(HPARAMS)
    return RunDescription(
        format=1,
        name="first-light",
        netuid=3,
        network="finney",
        first_window=1200,
        hparams=HparamsFile(file="hparams.json", sha256=hashlib.sha256(HPARAMS).hexdigest()),
        dataset=DatasetBucket(**BUCKET, subfolder="web"),
        aggregator=PublicBucket(**BUCKET | {"bucket_name": "sets"}),
        links={"website": "https://example.org/run?a=1"},
    )


def test_what_is_written_is_read_back(run: RunDescription, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(run.to_toml())
    assert load_description(tmp_path / "run.toml") == run
    assert tomllib.loads(run.to_toml())["dataset"]["subfolder"] == "web"


def test_its_variables_are_those_of_every_node(run: RunDescription) -> None:
    variables = run.variables()
    assert variables["TPLR_DATASET_SUBFOLDER"] == "web"
    assert variables["R2_DATASET_READ_SECRET_ACCESS_KEY"] == "c" * 64
    assert variables["R2_AGGREGATOR_BUCKET_NAME"] == "sets"
    assert not [name for name in variables if "CHECKPOINTS" in name or "WRITE" in name or "ENDPOINT" in name]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("netuid = 3", "netuid = 70000"), "netuid: Input should be less than"),
        (("netuid = 3", 'netuid = "3"'), "netuid: Input should be a valid integer"),
        (("format = 1", "format = 2"), "format: Input should be 1"),
        (("format = 1", "format = 1\nnettuid = 4"), "nettuid: Extra inputs are not permitted"),
        (('network = "finney"', 'network = "a\\u001b[31m"'), "network: String should match"),
        (('file = "hparams.json"', 'file = "../hparams.json"'), "hparams.file: String should match"),
        (('"https://', '"javascript://'), "links.website: String should match"),
        (("format = 1", 'format = 1\ns3_endpoint = "http://user@host/x"'), "s3_endpoint: expected http"),
        (("format = 1", "format = "), "is not TOML"),
        (("format = 1", "format = " + "[" * 5000), "is not TOML"),
        (("format = 1", "format = " + "1" * 5000), "is not TOML"),
        (("format = 1", 'format = 1\n"a\\u001b[31m" = 1'), r"a\\x1b\[31m: Extra inputs are not permitted"),
        (("format = 1", "#" * 70000 + "\nformat = 1"), "expected at most 65536 bytes"),
        (("format = 1", "format" + ".a" * 32000 + " = 1"), "line 3 has more than 64 dots"),  # took a minute
        (("format = 1", "format" + ".a" * 64 + " = 1"), "format: Input should be 1"),
    ],
)
def test_a_wrong_file_is_refused(run: RunDescription, tmp_path: Path, change: tuple[str, str], problem: str) -> None:
    text = run.to_toml()
    assert change[0] in text
    (tmp_path / "run.toml").write_text(text.replace(*change, 1))
    with pytest.raises(ConfigError, match=problem) as raised:
        load_description(tmp_path / "run.toml")
    assert "\x1b" not in str(raised.value)


def test_other_constants_than_the_runs_are_refused(run: RunDescription, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(run.to_toml())
    (tmp_path / "hparams.json").write_bytes(HPARAMS + b" ")
    with pytest.raises(ConfigError, match=r"hparams.json: SHA-256 is .* download both"):
        load_description(tmp_path / "run.toml")
    (tmp_path / "hparams.json").unlink()
    with pytest.raises(ConfigError, match=r"hparams.json: No such file"):
        load_description(tmp_path / "run.toml")
