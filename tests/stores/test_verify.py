"""Every missing or wrong file is named, all at once, in a bucket and in a folder."""

import json
import re
import shutil

import pytest
import yaml

from tplr.pages.build import write_dataset
from tplr.stores.expected_files import local_prefix
from tplr.stores.publish import publish
from tplr.stores.verify import verify
from tplr.testing.s3server import FlipBit, Reset, Status, Truncate


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "set"
    with write_dataset(folder, rows_per_group=10, rows_per_shard=60) as writer:
        writer.add("one", [f"row {i}" for i in range(150)])
    return folder


@pytest.fixture
def dataset(made, tmp_path):
    return shutil.copytree(made, tmp_path / "set")


def change_sizes(folder, change) -> None:
    sizes = json.loads((folder / "_shard_sizes.json").read_text())
    change(sizes["one"], sizes["one"]["shards"])
    (folder / "_shard_sizes.json").write_text(json.dumps(sizes))


def damage_all(folder):
    """Damage two shards in two ways, and add an unnamed file."""
    (folder / "one/train-00000.parquet").unlink()
    path = folder / "one/train-00001.parquet"
    path.write_bytes(path.read_bytes()[:50] + b"XX" + path.read_bytes()[52:])
    (folder / "one/notes.txt").write_bytes(b"hello")


async def test_all_is_well(dataset):
    found = await verify(*local_prefix(dataset))
    assert (found.files, found.problems, found.unlisted, found.unhashed) == (3, (), (), ())
    assert found.bytes == sum(path.stat().st_size for path in dataset.glob("one/*"))
    assert found.manifest is not None


async def test_every_problem_is_named_and_a_quick_look_sees_what_it_can(dataset):
    damage_all(dataset)
    found = await verify(*local_prefix(dataset))
    assert [problem.partition(":")[0] for problem in found.problems] == [
        "one/train-00000.parquet",
        "one/train-00001.parquet",
    ]
    assert "is missing" in found.problems[0]
    assert "its SHA-256 is" in found.problems[1]
    assert found.unlisted == ("one/notes.txt",)
    assert len((await verify(*local_prefix(dataset), hashes=False)).problems) == 1


def rows_shifted(entry, shards):
    shards[0]["num_rows"], shards[1]["num_rows"] = 59, 61


def groups_differ(entry, shards):
    shards[0]["row_group_size"] = 20


def another_size(entry, shards):
    shards[2]["byte_size"] += 1


def another_sum(entry, shards):
    entry["total_rows"] += 1


def too_few_rows(entry, shards):
    del shards[1:]
    entry["total_rows"] = 60


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize(
    ("change", "messages"),
    [
        (
            rows_shifted,
            ["00000.parquet has 60 rows, the manifest says 59", "00001.parquet has 60 rows, the .* says 61"],
        ),
        (groups_differ, ["row groups of 10, 10, 10, 10, 10, … rows, the manifest says 20 each"]),
        (another_size, ["00002.parquet: has .* bytes, the manifest says"]),
        (another_sum, ["total_rows is 151, but the shards add up to 150"]),
        (too_few_rows, ["config 'one' has 60 rows; pages need at least 102"]),
    ],
)
async def test_a_manifest_that_is_wrong(dataset, change, messages, quick):
    change_sizes(dataset, change)
    found = await verify(*local_prefix(dataset), hashes=not quick)
    assert len(found.problems) == len(messages)
    for problem, message in zip(found.problems, messages, strict=True):
        assert re.search(message, problem), problem


async def test_a_documented_manifest_without_hashes_is_checked_by_its_rows(dataset):
    def bare(entry, shards):
        for shard in shards:
            shard |= {"path": f"bucket/set/{shard['path']}", "sha256": None, "byte_size": None, "row_group_size": None}

    change_sizes(dataset, bare)
    (dataset / "_metadata.yaml").write_text(yaml.safe_dump({"configs": [{"config_name": "one"}]}))
    found = await verify(*local_prefix(dataset))
    assert (found.problems, len(found.unhashed)) == ((), 3)
    (dataset / "one/train-00002.parquet").write_bytes(b"no parquet")
    assert ["not a parquet file" in problem for problem in (await verify(*local_prefix(dataset))).problems] == [True]


async def test_a_bucket_is_verified_through_faults(served, dataset):
    await publish(dataset, served.store, "sub/set")
    await served.store.put("sub/settle/other", b"")  # another place, although its name has the same prefix
    served.server.faults.add(r"^GET /books\?", Status(503, "SlowDown"))
    served.server.faults.add(r"^GET .*/_shard_sizes", Reset())
    served.server.faults.add(r"^GET .*train-00000", Truncate(100, reset=True))
    served.server.faults.add(r"^HEAD .*train-00001", Status(500))
    found = await verify(served.store, "sub/set")
    assert (found.problems, found.unlisted) == ((), ())


async def test_a_damaged_bucket_is_told_like_a_folder(served, dataset):
    await publish(dataset, served.store, "sub/set")
    data = (dataset / "one/train-00001.parquet").read_bytes()
    await served.store.put("sub/set/one/train-00001.parquet", data[:50] + b"XX" + data[52:])
    await served.store.delete("sub/set/one/train-00000.parquet")
    await served.store.put("sub/set/one/notes.txt", b"hello")
    damage_all(dataset)
    assert (await verify(served.store, "sub/set")).problems == (await verify(*local_prefix(dataset))).problems
    assert (await verify(served.store, "sub/set")).unlisted == ("one/notes.txt",)


async def test_a_bit_that_flips_on_the_way_is_a_problem(served, dataset):
    await publish(dataset, served.store, "sub/set")
    served.server.faults.add(r"^GET .*train-00002", FlipBit(60), times=9)
    found = await verify(served.store, "sub/set")
    assert len(found.problems) == 1
    assert "train-00002.parquet: its SHA-256 is" in found.problems[0]


async def test_places_without_a_whole_manifest(served, dataset):
    found = await verify(served.store, "nowhere")
    assert found.problems == (
        "neither _metadata.yaml and _shard_sizes.json nor a meta.json: there is no dataset and no token store here",
    )
    (dataset / "_metadata.yaml").unlink()
    assert (await verify(*local_prefix(dataset))).problems == ("_metadata.yaml is missing: the dataset is incomplete",)
    await served.store.put("sub/set/_metadata.yaml", b"configs: [")
    await served.store.put("sub/set/_shard_sizes.json", b"{}")
    assert "is not YAML" in (await verify(served.store, "sub/set")).problems[0]
