"""Valid and invalid environments; no secret may appear in anything that could be printed."""

import json
import re
import subprocess
import sys
import traceback
from dataclasses import fields
from pathlib import Path

import certifi
import pytest

from tplr import config
from tplr.chain.commitment import encode_commitment
from tplr.config import Environment, HttpsSettings, hide_write_keys
from tplr.errors import ConfigError, StoreError
from tplr.resources import Resources
from tplr.schemas import Bucket
from tplr.storage import S3Connections, endpoint_url
from tplr.testing.s3server import keys as s3_keys
from tplr.testing.s3server import serve

KEY, SECRET = "a1" * 16, "c0ffee42" * 8


def variables(kind: str, *, write: bool = True) -> dict[str, str]:
    accesses = ["READ", "WRITE"] if write else ["READ"]
    return {
        f"R2_{kind}_ACCOUNT_ID": "0" * 32,
        f"R2_{kind}_BUCKET_NAME": f"{kind.lower()}-bucket",
        **{f"R2_{kind}_{access}_ACCESS_KEY_ID": KEY for access in accesses},
        **{f"R2_{kind}_{access}_SECRET_ACCESS_KEY": SECRET for access in accesses},
    }


def test_record_has_the_documented_shape():
    secrets = config.load_bucket_secrets(variables("GRADIENTS"))["gradients"]
    pair = {"access_key_id": KEY, "secret_access_key": SECRET}
    assert secrets == {
        "account_id": "0" * 32,
        "name": "gradients-bucket",
        "credentials": {"read": pair, "write": pair},
    }
    assert list(config.load_bucket_secrets({})) == ["gradients", "aggregator", "dataset", "checkpoints", "page"]


def test_a_bucket_is_checked_only_when_it_is_used():
    secrets = config.load_bucket_secrets(variables("GRADIENTS"))
    assert secrets["gradients"]["name"] == "gradients-bucket"
    with pytest.raises(ConfigError):
        secrets["dataset"]
    with pytest.raises(KeyError):
        secrets["weights"]


def test_all_problems_come_at_once_and_without_values():
    env = variables("GRADIENTS") | {"R2_GRADIENTS_ACCOUNT_ID": "evil.example/" + SECRET[:19], "R2_DATASET_X": "1"}
    env["R2_GRADIENTS_WRITE_SECRET_ACCESS_KEY"] = SECRET[:-1] + "Z"
    del env["R2_GRADIENTS_READ_ACCESS_KEY_ID"]
    with pytest.raises(ConfigError) as caught:
        config.load_bucket_secrets(env)["gradients"]
    named = [problem.split(": ")[1].split(" ")[0] for problem in caught.value.problems]
    assert named == [
        "R2_GRADIENTS_ACCOUNT_ID",
        "R2_GRADIENTS_READ_ACCESS_KEY_ID",
        "R2_GRADIENTS_WRITE_SECRET_ACCESS_KEY",
    ]
    assert "c0ffee" not in str(caught.value)
    assert "evil" not in str(caught.value)


def test_no_repr_shows_a_secret():
    env = variables("DATASET")
    secrets = config.load_bucket_secrets(env)
    for shown in (repr(secrets), str(secrets), repr(secrets["dataset"]), f"{secrets['dataset']}"):
        assert KEY not in shown
        assert SECRET not in shown
    assert str(secrets["dataset"]["credentials"]["read"]["secret_access_key"]) == SECRET


def test_dataset_and_aggregator_need_only_read_credentials():
    env = variables("DATASET", write=False) | variables("AGGREGATOR", write=False)
    assert config.Environment(env).bucket("dataset", "read").secret_access_key == SECRET
    with pytest.raises(ConfigError, match="R2_AGGREGATOR_WRITE_ACCESS_KEY_ID"):
        config.Environment(env).bucket("aggregator", "write")
    with pytest.raises(ConfigError, match="R2_GRADIENTS_WRITE_ACCESS_KEY_ID is missing"):
        config.load_bucket_secrets(variables("GRADIENTS", write=False))["gradients"]


def test_half_a_write_credential_is_a_problem():
    env = variables("DATASET")
    del env["R2_DATASET_WRITE_SECRET_ACCESS_KEY"]
    with pytest.raises(ConfigError, match="R2_DATASET_WRITE_SECRET_ACCESS_KEY is missing"):
        config.load_bucket_secrets(env)["dataset"]


def test_checkpoints_lie_with_the_gradients_unless_they_have_a_bucket():
    env = variables("GRADIENTS")
    assert config.Environment(env).bucket("checkpoints", "write").name == "gradients-bucket"
    env |= variables("CHECKPOINTS", write=False)
    assert config.Environment(env).bucket("checkpoints", "read").name == "checkpoints-bucket"


def test_every_setting_stands_in_the_example():
    example = (Path(__file__).parents[1] / ".env.example").read_text()
    documented = set(re.findall(r"^(?:# )?([A-Z0-9_]+)=", example, re.MULTILINE))
    wanted = {name for kind in config.KINDS for name in variables(kind.upper())}
    others = {
        "R2_DATASET_BUCKET_LIST",
        "TPLR_S3_ENDPOINT",
        "TPLR_S3_REGION",
        "TPLR_DATASET_SUBFOLDER",
        "TPLR_CACHE_FOLDER",
    }
    others |= {f"TPLR_{field.name.upper()}" for field in fields(Resources)}
    assert documented == wanted | others | {"R2_GRADIENTS_JURISDICTION"}  # each kind of bucket has one


def test_an_empty_variable_is_none():
    """As in a copy of ``.env.example`` with only the required values."""
    empty = dict.fromkeys(variables("CHECKPOINTS") | variables("AGGREGATOR"), "")
    secrets = config.load_bucket_secrets(variables("GRADIENTS") | empty)
    assert secrets["checkpoints"] == secrets["gradients"]
    assert config.Environment(empty).optional_bucket("aggregator") is None


def test_jurisdiction_reaches_the_bucket():
    env = variables("DATASET") | {"R2_DATASET_JURISDICTION": "eu"}
    assert config.Environment(env).bucket("dataset", "read").jurisdiction == "eu"
    env["R2_DATASET_JURISDICTION"] = "mars"
    with pytest.raises(ConfigError, match="default, eu or fedramp"):
        config.load_bucket_secrets(env)["dataset"]


def test_dataset_replicas():
    replica = {
        "account_id": "1" * 32,
        "name": "first",
        "credentials": {"read": {"access_key_id": KEY, "secret_access_key": SECRET}},
    }
    env = variables("DATASET") | {"R2_DATASET_BUCKET_LIST": json.dumps([replica, replica | {"name": "second"}])}
    secrets = config.load_bucket_secrets(env)
    assert [one["name"] for one in secrets["dataset"]["multiple"]] == ["first", "second"]
    assert [bucket.name for bucket in config.Environment(env).buckets("dataset", "read")] == ["first", "second"]
    assert SECRET not in repr(secrets["dataset"])
    del replica["name"]
    env["R2_DATASET_BUCKET_LIST"] = json.dumps([replica | {"bucket_name": "third"}])
    assert config.Environment(env).bucket("dataset", "read").name == "third"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[{" + SECRET, "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("{}", "expected a list"),
        ("[]", "expected a list"),
        ("[3]", "expected a list"),
        ('[{"account_id": 7, "credentials": []}]', r"R2_DATASET_BUCKET_LIST\[0\].account_id: expected 32"),
        ('[{"account_id": 7, "credentials": []}]', r"LIST\[0\].credentials.read.access_key_id is missing"),
    ],
)
def test_a_malformed_replica_list_is_refused(text, message):
    env = variables("DATASET") | {"R2_DATASET_BUCKET_LIST": text}
    with pytest.raises(ConfigError, match=message) as caught:
        config.load_bucket_secrets(env)["dataset"]
    assert SECRET not in str(caught.value)


def test_the_process_wins_over_dotenv_and_a_record_does_not_change(tmp_path, monkeypatch):
    for name in variables("DATASET"):
        monkeypatch.delenv(name, raising=False)
    lines = [f"{name}={value}" for name, value in variables("DATASET").items()]
    (tmp_path / ".env").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    assert config.BUCKET_SECRETS["dataset"]["name"] == "dataset-bucket"
    before = config.Environment.read()
    monkeypatch.setenv("R2_DATASET_BUCKET_NAME", "another")
    assert before.bucket("dataset", "read").name == "dataset-bucket"
    assert config.Environment.read().bucket("dataset", "read").name == "another"


def test_a_dotenv_that_is_no_text_is_named(tmp_path, monkeypatch):
    (tmp_path / ".env").write_text(f"R2_DATASET_READ_SECRET_ACCESS_KEY={SECRET}", encoding="utf-16")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"\.env: expected a readable file in UTF-8") as caught:
        config.BUCKET_SECRETS["dataset"]
    assert SECRET not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("value", ["http://127.0.0.1:9000", "https://s3.example.org/", ""])
def test_endpoint_override(value):
    assert config.Environment({"TPLR_S3_ENDPOINT": value}).endpoint == (value.rstrip("/") or None)


@pytest.mark.parametrize(
    "value",
    [
        "127.0.0.1:9000",
        "ftp://x",
        "http://x/bucket",
        "http://x:y",
        "http://x:0",
        "http://x:65536",
        "http://[::1",
        f"http://{KEY}:{SECRET}@x",
        "http://",
    ],
)
def test_a_strange_endpoint_is_refused_unseen(value):
    with pytest.raises(ConfigError, match="TPLR_S3_ENDPOINT") as caught:
        _ = config.Environment({"TPLR_S3_ENDPOINT": value}).endpoint
    assert SECRET not in str(caught.value)


OTHER_KEYS = [("minioadmin", "minioadmin"), ("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY")]


@pytest.mark.parametrize(("key", "secret"), OTHER_KEYS)
async def test_keys_of_another_server_work_at_its_endpoint(tmp_path, monkeypatch, key, secret):
    """Over HTTP, with checked signatures; the test server is given such keys."""
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "BUCKET_NAME"):
        monkeypatch.setattr(s3_keys, name, re.compile(r"[!-~]+"))
    pair = {"READ_ACCESS_KEY_ID": key, "READ_SECRET_ACCESS_KEY": secret}
    pair |= {name.replace("READ", "WRITE"): value for name, value in pair.items()}
    settings = {"BUCKET_NAME": "my.bucket"} | pair
    env = {f"R2_GRADIENTS_{name}": value for name, value in settings.items()}
    async with serve(tmp_path, {key: {"secret": secret, "buckets": {"my.bucket": "read-write"}}}) as server:
        at = config.Environment(env | {"TPLR_S3_ENDPOINT": server.endpoint})
        async with S3Connections.of(at) as connections:
            store = connections.store(at.bucket("gradients", "write"))
            await store.put("k", b"bytes")
            assert await store.get("k", max_bytes=5) == b"bytes"
        elsewhere = config.Environment(env | {"TPLR_S3_ENDPOINT": server.endpoint, "TPLR_S3_REGION": "eu-west-1"})
        async with S3Connections.of(elsewhere) as connections:
            with pytest.raises(StoreError, match="InvalidRegionName"):
                await connections.store(at.bucket("gradients", "read")).get("k", max_bytes=5)
    with pytest.raises(ConfigError, match="R2_GRADIENTS_ACCOUNT_ID is missing"):
        config.Environment(env).bucket("gradients", "read")
    with pytest.raises(ConfigError, match="set TPLR_S3_ENDPOINT"):
        endpoint_url(at.bucket("gradients", "read"))
    with pytest.raises(ValueError, match="R2's ids and keys only: bucket name: expected a bucket name"):
        encode_commitment(at.bucket("gradients", "read"))
    assert secret not in repr(at.bucket("gradients", "read")) + repr(at.record("gradients"))


def test_keys_of_r2_stay_buckets_of_r2_at_any_endpoint():
    env = config.Environment(variables("GRADIENTS") | {"TPLR_S3_ENDPOINT": "http://127.0.0.1:9000"})
    assert type(env.bucket("gradients", "read")) is Bucket
    bad = {"R2_GRADIENTS_BUCKET_NAME": "A", "R2_GRADIENTS_READ_ACCESS_KEY_ID": "a/b", "TPLR_S3_REGION": "no region"}
    env = config.Environment(env.variables | bad)
    with pytest.raises(ConfigError) as caught:
        env.bucket("gradients", "read")
    assert [problem.split(":")[1] for problem in caught.value.problems] == [f" {name}" for name in [*bad][:2]]
    with pytest.raises(ConfigError, match="TPLR_S3_REGION is 'no region'"):
        _ = env.region


def test_dataset_subfolder():
    env = variables("DATASET", write=False)
    assert config.Environment(env).dataset().subfolder == "HuggingFaceFW_fineweb-edu-score-2"
    assert config.Environment(env).dataset(default="other").subfolder == "other"
    named = config.Environment(env | {"TPLR_DATASET_SUBFOLDER": "a/b-2"})
    assert named.dataset(default="other").subfolder == "a/b-2"
    assert named.dataset(subfolder="c").subfolder == "c"
    assert [bucket.name for bucket in named.dataset().replicas] == ["dataset-bucket"]
    for value in ("/a", "a/", "a/../b", "a b"):
        with pytest.raises(ConfigError, match="TPLR_DATASET_SUBFOLDER"):
            config.Environment(env | {"TPLR_DATASET_SUBFOLDER": value}).dataset()


def test_all_problems_of_the_dataset_come_at_once():
    with pytest.raises(ConfigError) as caught:
        config.Environment({"TPLR_DATASET_SUBFOLDER": "/a"}).dataset()
    assert len(caught.value.problems) == 5
    assert "TPLR_DATASET_SUBFOLDER is '/a'" in caught.value.problems[-1]


def test_a_bucket_by_its_name():
    env = config.Environment(variables("DATASET"))
    own = env.location("dataset-bucket")
    assert own is not None
    assert (own.bucket.access_key_id, own.endpoint, own.region) == (KEY, None, "auto")
    assert env.location("elsewhere") is None


def test_importing_needs_no_environment(tmp_path):
    code = "import tplr.config, tplr.r2_dataset; print(len(tplr.config.BUCKET_SECRETS))"
    run = subprocess.run(
        [sys.executable, "-c", code], env={}, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.stdout.strip() == "5", run.stderr


def test_the_cache_lies_in_the_home_folder_or_where_it_is_said(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert str(config.Environment({}).cache_folder) == "/home/somebody/.cache/tplr"
    assert str(config.Environment({"TPLR_CACHE_FOLDER": "~/elsewhere"}).cache_folder) == "/home/somebody/elsewhere"
    with pytest.raises(ConfigError, match="TPLR_CACHE_FOLDER is ~no-such-user/x: no home folder is known for ~no-such"):
        _ = config.Environment({"TPLR_CACHE_FOLDER": "~no-such-user/x"}).cache_folder


def test_settings_of_tls_connections() -> None:
    assert Environment({}).https == HttpsSettings()
    proxies = {"HTTPS_PROXY": "http://loud", "https_proxy": "http://quiet", "NO_PROXY": "a,b"}
    bundle = certifi.where()
    assert Environment({"AWS_CA_BUNDLE": bundle, **proxies}).https == HttpsSettings(bundle, "http://quiet", "a,b")
    assert Environment({"HTTPS_PROXY": "me:p%40ss@[::1]:3128"}).https.proxy == "http://me:p%40ss@[::1]:3128"
    assert "password" not in repr(Environment({"HTTPS_PROXY": "http://name:password@proxy:3128"}).https)


@pytest.mark.parametrize(
    "proxy",
    [
        "http://me:PW@host:abc",
        "http://me:PW@host:0",
        "foo://me:PW@host",
        "http://me:PW@",
        "http://me:PW@[host",
        "http://P/W@h",
    ],
)
def test_a_wrong_proxy_is_told_without_its_password(proxy: str) -> None:
    """Every request would fail as if the server were down, and a service would wait for it without end."""
    for name in ("HTTPS_PROXY", "https_proxy"):
        with pytest.raises(ConfigError) as error:
            _ = Environment({name: proxy}).https
        assert error.value.problems == (
            f"{name}: expected http://[user:password@]host[:port], with escapes in the password (%40 for @)",
        )


def test_wrong_certificate_authorities_are_told_beside_a_wrong_proxy(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").touch()
    for path, reason in {tmp_path / "nowhere.pem": "No such file", tmp_path / "empty.pem": "no certificate"}.items():
        with pytest.raises(ConfigError) as error:
            _ = Environment({"AWS_CA_BUNDLE": str(path), "HTTPS_PROXY": "foo://host"}).https
        proxy, authorities = error.value.problems
        assert proxy.startswith("HTTPS_PROXY: expected")
        assert authorities.startswith(f"AWS_CA_BUNDLE is '{path}': expected a file of certificates in PEM form (")
        assert reason in authorities


def test_number_of_ranks() -> None:
    assert Environment({}).world_size == 1
    assert Environment({"WORLD_SIZE": "3"}).world_size == 3
    with pytest.raises(ConfigError, match="WORLD_SIZE is 'many'"):
        _ = Environment({"WORLD_SIZE": "many"}).world_size
    with pytest.raises(ConfigError, match="WORLD_SIZE is '0'"):
        _ = Environment({"WORLD_SIZE": "0"}).world_size
    assert Environment({"LOCAL_WORLD_SIZE": "4"}).local_world_size == 4


def test_names_that_nothing_reads_are_found() -> None:
    known = {"R2_GRADIENTS_ACCOUNT_ID": "1", "R2_DATASET_BUCKET_LIST": "[]", "TPLR_TRANSFERS": "9", "R2D2": "x"}
    assert Environment(known).unknown_names() == {}
    found = Environment(known | {"R2_GRADIENT_ACCOUNT_ID": "1", "TPLR_CACHE": "/", "R2_": ""}).unknown_names()
    assert found == {"R2_": "", "R2_GRADIENT_ACCOUNT_ID": "R2_GRADIENTS_ACCOUNT_ID", "TPLR_CACHE": "TPLR_CACHE_FOLDER"}


def test_every_variable_that_the_source_names_is_known() -> None:
    source = Path(config.__file__).parent
    named = {name for path in source.rglob("*.py") for name in re.findall(r'"(TPLR_[A-Z0-9_]+)"', path.read_text())}
    assert named <= {*config.TPLR_NAMES}
    assert {f"TPLR_{field.name.upper()}" for field in fields(Resources)} <= {*config.TPLR_NAMES}


def test_started_processes_inherit_no_write_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R2_GRADIENTS_WRITE_SECRET_ACCESS_KEY", "a" * 64)
    monkeypatch.setenv("R2_GRADIENTS_READ_SECRET_ACCESS_KEY", "b" * 64)
    before = Environment.read()
    hide_write_keys()
    command = [sys.executable, "-c", "import os; print(*os.environ)"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "R2_GRADIENTS_WRITE_SECRET_ACCESS_KEY" not in names
    assert "R2_GRADIENTS_READ_SECRET_ACCESS_KEY" in names
    assert before.variables["R2_GRADIENTS_WRITE_SECRET_ACCESS_KEY"] == "a" * 64
