"""``tplr generate`` prints the model's most probable tokens, piece by piece, from an export or a run."""

import pytest
import torch
from guides import from_guide

from tplr.run.folder import load_model
from tplr.run.generate import Sampling, generate


@pytest.fixture
def model(recorded, tplr, tmp_path, capsys):
    assert tplr("export", "--local", recorded.folder, "--out", "model") == 0
    capsys.readouterr()
    return tmp_path / "model"


def test_greedy_text_is_the_most_probable_one(model):
    loaded = load_model(model)
    pieces: list[str] = []
    text = generate(loaded, "def f", Sampling(tokens=12, temperature=0), pieces.append)
    ids = loaded.tokenizer("def f", return_tensors="pt")["input_ids"]
    given = ids.shape[1]
    while ids.shape[1] < given + 12 and ids[0, -1] != loaded.tokenizer.eos_token_id:
        with torch.no_grad():
            ids = torch.cat([ids, loaded.model(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert text == "".join(pieces) == loaded.tokenizer.decode(ids[0], skip_special_tokens=True)
    assert len(pieces) > 2


def test_a_seed_gives_the_same_text_and_another_one_another(model):
    loaded = load_model(model)
    texts = [generate(loaded, "import ", Sampling(tokens=20, seed=seed), lambda _: None) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_the_guides_command(model, tplr, capsys):
    assert tplr(*from_guide("docs/export.md", 'tplr generate model "def "').arguments) == 0
    assert capsys.readouterr().out.startswith("def ")


def test_from_an_export_and_from_a_run(model, recorded, tplr, capsys):
    words = ("--tokens", "8", "--temperature", "0")
    assert tplr("generate", model, "class A", *words) == 0
    of_folder = capsys.readouterr().out
    assert of_folder.startswith("class A")
    assert tplr("generate", "class A", *words, "--window", "latest", "--local", recorded.folder) == 0
    assert capsys.readouterr().out == of_folder
    assert tplr("generate", "class A", *words, "--local", recorded.folder) == 0  # the newest checkpoint


def test_positions_end(model, recorded):
    loaded = load_model(model)
    positions = loaded.model.config.max_position_embeddings
    text = generate(loaded, "x", Sampling(tokens=10**6, temperature=0), lambda _: None)
    assert len(loaded.tokenizer(text)["input_ids"]) <= 2 * positions


@pytest.mark.parametrize(
    ("words", "status", "problem"),
    [
        (["nowhere", "def "], 2, "nowhere: no config.json"),
        (["model", ""], 2, "the prompt has 0 tokens"),
        (["model", "x" * 5000], 2, "expected 1 to 127"),
    ],
)
def test_wrong_words_are_one_error(model, tplr, caplog, words, status, problem):
    assert tplr("generate", *words) == status
    assert problem in caplog.text


@pytest.mark.parametrize("words", [["a", "b", "c"], ["a", "--temperature", "-1"], ["a", "--tokens", "0"]])
def test_a_wrong_command_line_shows_the_usage(tplr, capsys, words):
    with pytest.raises(SystemExit) as refused:
        tplr("generate", *words)
    assert refused.value.code == 2
    assert capsys.readouterr().err.startswith("usage: tplr generate")
