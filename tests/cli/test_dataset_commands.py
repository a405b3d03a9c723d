"""The commands of ``docs/datasets.md`` run in order on a real server; the output of commands that fail."""

import asyncio
import gzip
import json
import re
import shlex
from pathlib import Path

import pytest
from guides import all_of_guide

from tplr import config
from tplr.cli import main
from tplr.pages.fetch_manifest import fetch_manifest
from tplr.pages.page_draw import next_pages, pages_digest
from tplr.storage.replicas import Replicas
from tplr.stores.preprocess.config import PipelineConfig

ROOT = Path(__file__).parents[2]
COMMANDS = all_of_guide("docs/datasets.md")


@pytest.fixture
def operator(served, tmp_path, monkeypatch, tokenizer):
    """A folder with an operator's texts, and the settings that the page requires."""
    monkeypatch.setattr("tplr.cli.reported.setup_logging", lambda **_: None)  # logging settings would outlive the test
    for name in [name for name in config.Environment.read().variables if name.startswith(("R2_", "TPLR_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TPLR_S3_ENDPOINT", served.server.endpoint)
    monkeypatch.setenv("R2_DATASET_ACCOUNT_ID", served.bucket.account_id)
    monkeypatch.setenv("R2_DATASET_BUCKET_NAME", served.bucket.name)
    for access in ("READ", "WRITE"):
        monkeypatch.setenv(f"R2_DATASET_{access}_ACCESS_KEY_ID", served.bucket.access_key_id)
        monkeypatch.setenv(f"R2_DATASET_{access}_SECRET_ACCESS_KEY", served.bucket.secret_access_key)
    folder = tmp_path / "operator"
    (folder / "texts/web").mkdir(parents=True)
    for i in range(120):
        (folder / f"texts/web/{i:03}.txt").write_text(f"Page {i} of the web.\n" * (i + 1))
    lines = [json.dumps({"text": f"Book {i}, \x1b[31mred"}) for i in range(150)]
    (folder / "texts/books.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    tokenizer.save_pretrained(folder / "tokenizer")
    hparams = json.loads((ROOT / "hparams-demo.json").read_text())
    (folder / "hparams.json").write_text(
        json.dumps(
            hparams
            | {"tokenizer_name": "tokenizer", "profile": "documented", "probation_windows": 0, "pages_per_window": 6}
        )
    )
    monkeypatch.chdir(folder)
    return folder


async def run(command: str) -> int:
    return await asyncio.to_thread(main, shlex.split(command)[1:])


async def test_the_guide_is_true(operator, served, capsys):
    assert {command.split()[2] for command in COMMANDS} == {"make", "verify", "page", "upload"}
    said = {}
    for command in COMMANDS:
        assert await run(command) == 0, capsys.readouterr().err
        said[command] = capsys.readouterr().out
        assert said[command], command
    # The figures that different commands give agree with each other and with the library.
    manifest = await fetch_manifest(Replicas([served.store]), "books-and-web")
    assert {name: entry.num_rows for name, entry in manifest.configs.items()} == {"web": 120, "books": 150}
    assert all(manifest.sha256 in text for command, text in said.items() if "upload" not in command)
    by_seed, by_uid = said[COMMANDS[-2]], said[COMMANDS[-1]]
    for text, offset, seed in ((by_seed, 42, 7), (by_uid, 120 * 6, 3)):
        pages = next_pages(manifest.configs.values(), offset=offset, n_pages=6, seed=seed)
        assert re.findall(r"^(\w+):(\d+) \(train\): 100 rows", text, re.MULTILINE) == [
            (page.config, str(page.row)) for page in pages
        ]
        assert pages_digest(pages, manifest.sha256) in text
    shown = next(text for command, text in said.items() if "web:0 books:17" in command)
    assert re.search(r"^ +17 +'Book 17, \\x1b\[31mred'$", shown, re.MULTILINE)
    assert "\x1b" not in shown
    # One token for each byte, and an EOS.
    [(characters, tokens), *_] = re.findall(r"100 rows, (\d+) characters, (\d+) tokens", by_uid)
    assert int(tokens) == int(characters) + 100


async def test_so_is_the_one_of_preprocessing(operator, capsys):
    """Its commands in order, from raw records to a token store in a bucket."""
    (operator / "chats.jsonl").write_text("".join(f'{{"text": "chat {i}, {"and so on " * 6}"}}\n' for i in range(40)))
    PipelineConfig.from_dict({"input": {"sections": [{"field": "text"}]}}).to_file(operator / "config.json")
    said = []
    for command in all_of_guide("docs/preprocessing.md"):
        assert await run(command) == 0, capsys.readouterr().err
        said.append(capsys.readouterr().out)
    prepared, uploaded, verified = said
    assert "40 records" in prepared
    assert "tokens" in uploaded
    assert "0 problems" in verified


async def test_scripts_are_the_same_verbs(capsys):
    for script in sorted((ROOT / "scripts/dataset").glob("*.py")):
        assert f'main(["data", "{script.stem}", *sys.argv[1:]])' in script.read_text()
        with pytest.raises(SystemExit) as ended:
            main(["data", script.stem, "--help"])
        assert ended.value.code == 0
        assert f"usage: tplr data {script.stem}" in capsys.readouterr().out


async def test_a_bucket_with_problems_is_status_1(operator, served, capsys):
    for command in COMMANDS[:1] + [line for line in COMMANDS if "upload" in line]:
        assert await run(command) == 0
    await served.store.delete("books-and-web/web/train-00000.parquet")
    capsys.readouterr()
    assert await run("tplr data verify --subfolder books-and-web") == 1
    told = capsys.readouterr().out
    assert "books/books-and-web: web/train-00000.parquet: is missing\n" in told
    assert "2 files, " in told
    assert "1 problems" in told


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("make out texts/none", "texts/none: no such file or folder"),
        ("make texts texts/web", "texts exists"),
        ("make out texts/web --field body --row-characters 0", "--row-characters 0"),
        ("make out few=texts/web/000.txt", "'few' has 1 rows"),
        ("make out books=texts/books.jsonl.gz --field body", "books.jsonl.gz line 1: expected .* field 'body'"),
        ("verify --folder nowhere", "nowhere: no such folder"),
        ("verify --subfolder ../x", "TPLR_DATASET_SUBFOLDER is '../x'"),
        ("upload texts", "there is no dataset and no token store here"),
        ("page --folder texts", "_metadata.yaml"),
        ("page web:1 --seed 3", "web"),
    ],
)
async def test_what_can_not_be_done_is_said_and_is_status_2(operator, capsys, command, message):
    assert await run(f"tplr data {command}") == 2
    error = capsys.readouterr().err
    assert re.search(rf"^tplr data {command.split()[0]}: .*{message}", error), error
    assert not (operator / "out").exists()


async def test_bad_lines_are_skipped_when_asked_for(operator, capsys, caplog):
    (operator / "lines.jsonl").write_text(
        "".join(f'{{"text": "row {i}"}}\n' for i in range(150)) + '{"text": 5}\n{"tex\n\n'
    )
    with caplog.at_level("INFO", logger="tplr"):
        assert await run("tplr data make out lines.jsonl --skip-bad") == 0
    assert re.search(r"lines: 150 rows of 1 files; skipped: 1 × blank line, 1 × expected .*, 1 × not JSON", caplog.text)
    assert await run("tplr data page lines:140 --folder out") == 2  # no page begins there
    assert "Could not find shard for page 140" in capsys.readouterr().err
    for wrong, message in (
        ("nope:1", "no such config; there are lines"),
        ("lines", "expected CONFIG:ROW"),
        ("--uid 1", "--uid needs --window and --hparams"),
        ("lines:1 --seed 4", "no pages given"),
    ):
        assert await run(f"tplr data page {wrong} --folder out") == 2
        assert message in capsys.readouterr().err
    assert await run("tplr data page lines:1 --folder out --rows 2") == 0
    assert re.findall(r"'(row \d+)'", capsys.readouterr().out) == ["row 1", "row 2"]
