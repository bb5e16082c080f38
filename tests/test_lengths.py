"""Lengths of samples: batches are padded to their longest, and the share of batches that fits is found."""

import json

import numpy
import pytest

from tests.test_suggestions import answer_of
from vramcast.commands.classify.classify_command import main
from vramcast.commands.classify.lengths import batch_lengths, read_lengths, with_lengths
from vramcast.commands.classify.page import Page, render_page
from vramcast.commands.classify.request import ClassifyRequest
from vramcast.errors import UserError


def test_a_batch_is_as_long_as_its_longest_sample():
    lengths = batch_lengths([3, 9, 4, 200, 5], 5, None)
    assert lengths == (200,)
    assert batch_lengths([3, 9, 4, 200, 5], 1, 100) == (3, 4, 5, 9, 100)  # cut to the longest
    many = batch_lengths(range(1, 1001), 4, None)
    assert len(many) == 250 and list(many) == sorted(many) and many[-1] == 1000
    assert many == batch_lengths(range(1, 1001), 4, None)


@pytest.mark.parametrize(("limit", "fitting"), [(1000, 100), (57, 57), (1, 1), (0, 0)])
def test_the_share_of_batches_that_fits(limit, fitting):
    lengths, asked = tuple(range(1, 101)), []

    def answer_for(length):
        asked.append(length)
        return answer_of(length, limit + 0.5)

    answer = with_lengths(answer_of(100, limit + 0.5), lengths, answer_for)
    assert answer.lengths["longest_fitting"] == fitting and answer.lengths["fitting_share"] == fitting / 100
    assert answer.lengths["p50"] == 50 and answer.lengths["longest"] == 100 and len(asked) <= 7


def test_the_page_says_which_batches_fit():
    answer = with_lengths(answer_of(100, 57.5), tuple(range(1, 101)), lambda length: answer_of(length, 57.5))
    text = " ".join(render_page(Page(answer, "made")).split())
    assert "Of 100 batches, padded to their longest sample, 57 % fit this device safely (up to 57 tokens)" in text


def test_files_of_lengths(tmp_path):
    text, array = tmp_path / "lengths.txt", tmp_path / "lengths.npy"
    text.write_text("12\n7\n300\n")
    numpy.save(array, numpy.array([12, 7, 300], dtype=numpy.int32))
    assert read_lengths(str(text)) == read_lengths(str(array)) == [12, 7, 300]
    for content in ("", "a\n", "3\n0\n"):
        text.write_text(content)
        with pytest.raises(UserError, match="expected"):
            read_lengths(str(text))


def test_lengths_need_a_language_model_and_padding(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("12\n7\n300\n")
    values = {"target": "hf:gpt2", "batch_size": 2, "lengths": str(path)}
    assert ClassifyRequest.of({**values, "input": "128"}).input == ("128",)
    for wrong in ({"target": "timm:resnet50"}, {"packed": True}, {"batch_size": None}):
        with pytest.raises(UserError, match="expected lengths beside"):
            ClassifyRequest.of({**values, **wrong})


def test_a_jobs_file_of_lengths_is_answered(tmp_path, capsys):
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
              "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 100}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "lengths.txt").write_text("20\n30\n40\n")
    job = {"target": f"hf:{tmp_path / 'config.json'}", "batch_size": 1, "lengths": str(tmp_path / "lengths.txt")}
    (tmp_path / "jobs.jsonl").write_text(json.dumps(job))
    assert main(["--jobs", str(tmp_path / "jobs.jsonl"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["lengths"]["fitting_share"] == 1 and answer["inputs"][0]["shape"] == [40]
