"""tokenize gives the results of calling the tokenizer for each sample, with every engine."""

import random
import threading

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from tplr.concurrency.workers import WorkerDied
from tplr.data import CheckpointableDataset, interleave_datasets
from tplr.errors import DataError, StateError
from tplr.streams.testing import check_resume, same
from tplr.streams.transforms import tokenize
from tplr.streams.transforms.bos_eos import missing_bos_eos

TEXTS = [{"text": f"{'word ' * (i % 7)}{i} é<s>", "n": i} for i in range(40)]
SOURCE = CheckpointableDataset.from_sequence(TEXTS)


def make(bos: str | None, eos: str | None, template: str = "$A", **options) -> PreTrainedTokenizerFast:
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=bos, eos_token=eos, **options)


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(tokenize, "FIRST_CHARACTERS", 1)
    monkeypatch.setattr(tokenize, "MAX_CHARACTERS", 3000)


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("template", ["$A", "<s> $A </s>"])
@pytest.mark.parametrize("how", [{"parallel": False}, {}, {"max_workers": 3, "prefetch_factor": 2, "ordered": False}])
def test_as_one_call_for_each_sample(template, how):
    tokenizer = make("<s>", "</s>", template)
    found = check_resume(SOURCE.tokenize(tokenizer, **how), places=[0, 1, 2, 17, 40])
    assert same(found, [{**sample, **tokenizer(sample["text"])} for sample in TEXTS])


@pytest.mark.parametrize(
    "kwargs",
    [{"truncation": True, "max_length": 5}, {"return_tensors": "pt"}, {"return_tensors": "np"},
     {"padding": "max_length", "max_length": 50}, {"return_attention_mask": False}, {"add_special_tokens": False}],
)  # fmt: skip
def test_with_the_tokenizers_own_arguments(kwargs):
    tokenizer = make("<s>", "</s>", "<s> $A", pad_token="</s>")
    found = list(SOURCE.tokenize(tokenizer, kwargs))
    assert same(found, [{**sample, **tokenizer(sample["text"], **kwargs)} for sample in TEXTS])


def test_pipelines_with_one_tokenizer_and_different_arguments_do_not_disturb_each_other():
    tokenizer = make("<s>", "</s>")
    source = CheckpointableDataset.from_sequence([{"text": "word " * 40}] * 500)
    short, long = (source.tokenize(tokenizer, {"truncation": True, "max_length": n}) for n in (8, 16))
    with interleave_datasets([short, long]).iter() as samples:
        lengths = []
        for sample in samples:
            lengths.append(len(sample["input_ids"]))
            assert len(tokenizer(sample["text"])["input_ids"]) == 200  # the program's own calls
    assert lengths == [8, 16] * 500


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # forked with threads, on purpose
@pytest.mark.parametrize("side", ["right", pytest.param("left", marks=pytest.mark.long)], ids=["fast", "called"])
def test_workers_forked_while_another_pipeline_tokenizes_do_not_hang(side):
    tokenizer = make(None, "</s>", truncation_side=side)
    rng = random.Random(1)
    words = ({"text": " ".join(rng.randbytes(4).hex() for _ in range(500))} for _ in iter(int, 1))
    loader = DataLoader(SOURCE.tokenize(tokenizer), batch_size=None, num_workers=1, timeout=20)
    ended = threading.Event()

    def tokenize_new_words() -> None:
        with CheckpointableDataset.from_iterable(words).tokenize(tokenizer).iter() as samples:
            while not ended.is_set():
                next(samples)

    thread = threading.Thread(target=tokenize_new_words)
    thread.start()
    try:
        for _ in range(8):
            assert len(list(loader)) == len(TEXTS)
    finally:
        ended.set()
        thread.join()


def test_any_callable_is_a_tokenizer():
    class Characters:
        def __call__(self, text, shift=0):
            return {"input_ids": [ord(char) + shift for char in text]}

    found = list(SOURCE.tokenize(Characters(), {"shift": 1}))
    assert found == [{**sample, "input_ids": [ord(char) + 1 for char in sample["text"]]} for sample in TEXTS]


class Deadly:
    """Ends each other process that calls it. There it is the second function, so that none imports this file."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [len(text)]}

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, ("lambda text: __import__('os')._exit(3)",)


def test_the_death_of_a_worker_process_is_an_error_and_loses_no_sample() -> None:
    dataset = SOURCE.tokenize(Deadly(), max_workers=1, executor_type="process")
    with dataset.iter() as samples:
        for _ in range(2):
            with pytest.raises(WorkerDied, match="status 3"):
                next(samples)
        state = samples.state_dict()
    rest = SOURCE.tokenize(Deadly(), parallel=False).iter(state)
    assert [sample["n"] for sample in rest] == list(range(40))


def test_columns_stay_what_the_user_makes_of_them():
    """Only token steps exchange arrays; a user's function gets lists, and the source's samples are not changed."""
    tokenizer = make("<s>", "</s>")
    seen = []
    dataset = SOURCE.tokenize(tokenizer).map(lambda sample: seen.append(sample) or sample).concat_chunk(10)
    list(dataset)
    assert all(type(sample["input_ids"]) is type(sample["attention_mask"]) is list for sample in seen)
    assert "input_ids" not in TEXTS[0]


def test_the_sample_that_has_no_text_is_named_and_those_before_it_come():
    source = CheckpointableDataset.from_sequence([*TEXTS[:3], {"text": None}, *TEXTS[3:]])
    with source.tokenize(make("<s>", "</s>")).iter() as samples:
        assert [next(samples)["n"] for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="column 'text' must hold a string, got NoneType"):
            next(samples)


def test_a_tokenizers_error_comes_with_its_sample():
    def picky(text):
        if text.startswith("word word 2 "):
            raise LookupError(text)
        return {"input_ids": [1]}

    with SOURCE.tokenize(picky).iter() as samples:
        assert [next(samples)["n"] for _ in range(2)] == [0, 1]
        with pytest.raises(LookupError, match="word word 2 "):
            next(samples)
        assert next(samples)["n"] == 3  # the error was this sample's turn


def test_a_text_that_no_tokenizer_takes_is_named(tokenizer):
    texts = [{"text": "one"}, {"text": "two \ud800 three"}, {"text": "four"}]
    with CheckpointableDataset.from_sequence(texts).tokenize(tokenizer).iter() as samples:
        assert next(samples)["text"] == "one"
        with pytest.raises(DataError, match=r"column 'text' holds a lone surrogate.* at 4: 'two \\ud800 three'"):
            next(samples)
        assert next(samples)["text"] == "four"


def test_a_state_of_another_tokenizer_is_refused():
    with SOURCE.tokenize(make("<s>", "</s>")).iter() as samples:
        next(samples)
        state = samples.state_dict()
    with pytest.raises(StateError, match="transform 2 was tokenize"):
        SOURCE.tokenize(make("<s>", "</s>", "<s> $A")).iter(state_dict=state)
    with pytest.raises(StateError, match="transform 2 was tokenize"):
        SOURCE.tokenize(make("<s>", "</s>"), {"add_special_tokens": False}).iter(state_dict=state)


@pytest.mark.parametrize(
    ("bos", "eos", "template", "missing"),
    [
        ("<s>", "</s>", "$A", (0, 1)),
        ("<s>", "</s>", "<s> $A", (None, 1)),
        ("<s>", "</s>", "$A </s>", (0, None)),
        ("<s>", "</s>", "<s> $A </s>", (None, None)),
        (None, "</s>", "$A", (None, 1)),
        (None, "</s>", "$A </s>", (None, None)),
        ("<s>", None, "$A", (0, None)),
        ("<s>", "<s>", "$A", (None, 0)),
        ("<s>", "<s>", "<s> $A", (None, None)),
        ("<s>", "<s>", "$A <s>", (None, None)),
        (None, None, "$A", (None, None)),
    ],
)
def test_ensure_bos_eos_adds_what_the_tokenizer_does_not(bos, eos, template, missing):
    tokenizer = make(bos, eos, template)
    assert missing_bos_eos(tokenizer) == missing
    ids = list(CheckpointableDataset.from_sequence([{"text": "ab"}]).tokenize(tokenizer).ensure_bos_eos(tokenizer))
    body = [i for i in tokenizer("ab")["input_ids"] if i > 1]
    first = [0] if bos and bos != eos else [0] if template.startswith("<s>") else []
    last = [1] if eos == "</s>" else [0] if eos == "<s>" and not first else []
    assert ids[0]["input_ids"].tolist() == [*first, *body, *last]


def test_ensure_bos_eos_refuses_a_tokenizer_that_contradicts_itself():
    class Two:
        bos_token_id, eos_token_id = 1, 2

        def encode(self, text):
            return [1, 5]

        def __call__(self, text):
            return {"input_ids": [5]}

    with pytest.raises(ValueError, match="use add_bos_eos"):
        SOURCE.ensure_bos_eos(Two())


def test_bos_and_eos_on_any_column_of_tokens():
    source = CheckpointableDataset.from_sequence([{"a": np.array([5]), "b": torch.tensor([[6, 7]])}])
    (sample,) = source.add_bos_eos(1, 2, "b").add_bos_eos(3, None, "a")
    assert (sample["a"].tolist(), sample["b"].tolist()) == ([3, 5], [1, 6, 7, 2])
    with pytest.raises(KeyError, match="no column 'input_ids'"):
        list(source.add_bos_eos(1, 2))
