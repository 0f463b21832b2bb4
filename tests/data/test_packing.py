"""Documents packed into rows: none is lost, and none sees another."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from paceline.data import Images, PackedText, Spec, Text
from paceline.data.masked_text import NOT_ASKED
from paceline.data.packed_text import PackedSource
from paceline.data.packing import pack
from paceline.data.tokens import encode_documents, tokenise_samples
from paceline.errors import DataError
from paceline.recipes import resnet  # noqa: F401  # registers its model
from paceline.recipes.transformer_lm import TransformerLM
from paceline.training import Run

METHODS = ["concatenate", "best_fit"]


def make_texts(num, longest=40, seed=0):
    generator = np.random.default_rng(seed)
    return [bytes(generator.integers(1, 250, generator.integers(2, longest)).astype(np.uint8)) for _ in range(num)]


def make_source(texts, row_length=16, method="best_fit"):
    return PackedSource(encode_documents(texts, None, None), np.arange(len(texts)), row_length, method)


@pytest.mark.parametrize("method", METHODS)
@settings(deadline=None, max_examples=60)
@given(lengths=st.lists(st.integers(0, 50), min_size=1, max_size=40), row_length=st.integers(1, 20))
def test_each_pair_stands_in_one_row(method, lengths, row_length):
    packing = pack(np.array(lengths), row_length, method)
    seen = []
    for row in range(packing.num_rows):
        pieces = list(packing.list_pieces(row))
        assert 0 < sum(length for _, _, length in pieces) <= row_length
        assert all(length > 0 for _, _, length in pieces)
        seen += [(document, place) for document, start, length in pieces for place in range(start, start + length)]
    assert sorted(seen) == [(document, place) for document, length in enumerate(lengths) for place in range(length)]


@settings(deadline=None, max_examples=60)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40), row_length=st.integers(1, 20))
def test_the_ways_to_pack_keep_what_they_promise(lengths, row_length):
    joined, fitted = (pack(np.array(lengths), row_length, method) for method in METHODS)
    assert joined.num_rows == -(-sum(lengths) // row_length)
    pieces = [length for row in range(fitted.num_rows) for _, _, length in fitted.list_pieces(row)]
    assert len(pieces) == sum(-(-length // row_length) for length in lengths), "only what is longer than a row is cut"
    rooms = sorted(
        row_length - sum(length for _, _, length in fitted.list_pieces(row)) for row in range(fitted.num_rows)
    )
    smallest = min(pieces)
    assert sum(room >= max(smallest, row_length / 2 + 1) for room in rooms) <= 1, "two rows half empty would be one"


def test_best_fit_takes_the_row_with_the_least_room():
    packing = pack(np.array([6, 5, 4, 3, 2]), 10, "best_fit")
    rows = [[document for document, _, _ in packing.list_pieces(row)] for row in range(packing.num_rows)]
    assert rows == [[0, 2], [1, 3, 4]]


def test_a_row_has_the_tokens_documents_positions_and_targets_of_its_documents():
    source = make_source([b"abcd", b"xyz"], row_length=8)
    (tokens, documents, positions), targets = source.read(np.array([0]))
    assert bytes(tokens[0, :5].tolist()) == b"abcxy"
    assert documents.tolist() == [[0, 0, 0, 1, 1, 2, 2, 2]]
    assert positions.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert targets.tolist() == [[*b"bcd", *b"yz", NOT_ASKED, NOT_ASKED, NOT_ASKED]]


def build():
    torch.manual_seed(0)
    return TransformerLM(width=16, num_layers=2, num_heads=2).build(Spec(256, (16,))).double()


def sum_losses(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NOT_ASKED, reduction="sum")


@pytest.mark.parametrize("method", METHODS)
def test_the_packed_loss_and_its_gradient_are_those_of_each_piece_alone(method):
    source = make_source(make_texts(30), method=method)
    packed, alone = build(), build()
    inputs, targets = source.read(np.arange(len(source)))
    loss = sum_losses(packed(*inputs), targets)
    expected = torch.zeros((), dtype=torch.float64)
    for row, ids in enumerate(inputs[1]):
        for number in ids.unique():
            here = ids == number
            if (targets[row, here] != NOT_ASKED).any():
                expected = expected + sum_losses(alone(inputs[0][row, here][None]), targets[row, here][None])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    loss.backward()
    expected.backward()
    for (name, mine), other in zip(packed.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-6, atol=1e-9, msg=name)


def test_documents_shorter_than_a_row_lose_nothing_by_being_packed():
    texts = make_texts(30, longest=15)
    source, model = make_source(texts), build().float()
    inputs, targets = source.read(np.arange(len(source)))
    with torch.no_grad():
        packed = sum_losses(model(*inputs), targets) / (targets != NOT_ASKED).sum()
        alone = [torch.tensor(list(text))[None] for text in texts]
        total = sum(sum_losses(model(tokens[:, :-1]), tokens[:, 1:]) for tokens in alone)
    assert packed.item() == pytest.approx(total.item() / sum(len(text) - 1 for text in texts), abs=1e-6)


# The data setting


def write_texts(folder, num=20):
    folder.mkdir()
    for number, text in enumerate(make_texts(num, seed=3)):
        (folder / f"{number}.txt").write_bytes(text)
    return folder


def test_a_folder_of_files_and_a_file_of_parts_are_documents(tmp_path):
    folder = write_texts(tmp_path / "texts")
    joined = tmp_path / "joined.txt"
    joined.write_bytes(b"<end>".join(path.read_bytes() for path in folder.iterdir()))
    counts = []
    for data in (PackedText(path=folder), PackedText(path=joined, separator="<end>")):
        splits = data.open()
        counts.append(
            [int((side.read(np.arange(len(side)))[1] != NOT_ASKED).sum()) for side in (splits.train, splits.held_out)]
        )
    assert counts[0] == counts[1], "the same documents are held out"
    assert sum(counts[0]) == sum(len(text) - 1 for text in make_texts(20, seed=3))


def test_too_few_documents_are_refused(tmp_path):
    (tmp_path / "one.txt").write_text("a\n\nlonger one")
    with pytest.raises(DataError, match=r"two documents or more of two tokens or more, .* but got 1"):
        PackedText(path=tmp_path / "one.txt").open()


@pytest.mark.parametrize("data", [PackedText, Text, Images])
def test_paths_are_of_this_machine_and_urls_of_elsewhere_are_told_what_reads_them(data, tmp_path):
    assert data(path=f"file://{tmp_path}/a").path == tmp_path / "a"
    assert data(path=str(tmp_path)).path == tmp_path
    with pytest.raises(
        ValidationError, match="path must be one of this machine, but got an URL of s3; copy it here, or take"
    ):
        data(path="s3://bucket/folder")


@pytest.fixture
def tokenizer(tmp_path):
    package = pytest.importorskip("tokenizers")
    made = package.Tokenizer(package.models.BPE())
    made.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=package.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(["the order of the samples is the order of the data"] * 5, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_a_tokenizer_runs_once_where_tokens_are_kept(tmp_path, tokenizer, monkeypatch):
    from tokenizers import Tokenizer

    texts = [b"the order of the data", b"samples", "größer".encode()]
    first = encode_documents(texts, tokenizer, None)
    assert first.vocab_size > 256
    parts = np.split(first.tokens, first.offsets[1:-1])
    assert [Tokenizer.from_file(str(tokenizer)).decode(part.tolist()).encode() for part in parts] == texts
    assert len(parts[0]) < len(texts[0])
    cache = tmp_path / "cache"
    kept = encode_documents(texts, tokenizer, cache)
    monkeypatch.setattr("paceline.data.tokens._encode", None)
    again = encode_documents(texts, tokenizer, cache)
    for documents in (kept, again):
        assert np.array_equal(documents.tokens, first.tokens)
        assert np.array_equal(documents.offsets, first.offsets)
        assert documents.vocab_size == first.vocab_size
    with pytest.raises(TypeError):  # other texts are encoded anew
        encode_documents(texts[:2], tokenizer, cache)


def test_text_of_another_coding_is_told_to_who_gives_a_tokenizer(tmp_path, tokenizer):
    folder = write_texts(tmp_path / "texts")
    for path in folder.iterdir():
        path.write_text("the order of the data")
    (folder / "old.txt").write_bytes("the größe".encode("latin-1"))
    assert PackedText(path=folder).open().train is not None, "bytes may be any"
    with pytest.raises(DataError, match=r"old\.txt must be text in UTF-8, but byte 6 is 0xf6; convert it"):
        PackedText(path=folder, tokenizer=tokenizer).open()
    joined = tmp_path / "joined.txt"
    joined.write_bytes("the data\n\nthe order\n\nthe größe".encode())
    cut = PackedText(path=joined, tokenizer=tokenizer, max_bytes=27)
    assert cut.open().train is not None, "a limit may cut a character"


def test_numbers_that_a_tokenizer_leaves_out_are_in_its_vocabulary(tmp_path):
    package = pytest.importorskip("tokenizers")
    words = {"the": 0, "[UNK]": 1, "data": 70_000}
    made = package.Tokenizer(package.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = package.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "holes.json"))
    found = encode_documents([b"the data", b"data"], tmp_path / "holes.json", None)
    assert found.tokens.tolist() == [0, 70_000, 70_000]
    assert found.vocab_size == 70_001


def test_a_tokenizer_that_cuts_and_pads_for_its_last_user_does_neither_here(tmp_path, tokenizer):
    from tokenizers import Tokenizer

    texts = ["the order of the data " * 9, "samples"]
    expected = encode_documents([text.encode() for text in texts], tokenizer, None)
    changed = Tokenizer.from_file(str(tokenizer))
    changed.enable_truncation(5)
    changed.enable_padding(length=20)
    changed.save(str(tmp_path / "changed.json"))
    found = encode_documents([text.encode() for text in texts], tmp_path / "changed.json", None)
    assert found.lengths.tolist() == expected.lengths.tolist()
    assert found.tokens.tolist() == expected.tokens.tolist()
    rows = tokenise_samples([{"text": text} for text in texts], tmp_path / "changed.json")
    assert [len(row["tokens"]) for row in rows] == expected.lengths.tolist()


def test_what_is_no_tokenizer_is_refused(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "no.json").write_text("{}")
    with pytest.raises(DataError, match=r"no\.json must be a tokenizer\.json"):
        encode_documents([b"text"], tmp_path / "no.json", None)


def test_models_and_layouts_that_mix_documents_are_refused():
    common = {"data": PackedText(), "loss": "next_token", "global_batch": 4, "num_steps": 1}
    with pytest.raises(
        ValueError, match="must keep documents of a row apart for data packed_text, but resnet does not"
    ):
        Run(model="resnet", **common)
    with pytest.raises(ValueError, match="layout must have no pipeline with data packed_text"):
        Run(model="transformer_lm", layout={"pipeline": 2}, **common)
