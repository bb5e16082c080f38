"""Lines of a jobs file that are no jobs: each is an error of its own, with its number, and the others are answered."""

import json
import sys
from io import BytesIO, StringIO, TextIOWrapper

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from vramcast.collocation.service.named_specs import read_named_specs
from vramcast.commands.classify.classify_command import main
from vramcast.commands.classify.request import KEYS, ClassifyRequest
from vramcast.errors import UserError
from vramcast.files.json_lines import numbered_lines, parse_object
from vramcast.jobs.architectures import find_architecture
from vramcast.jobs.targets import parse_argument, parse_shape, parse_target
from vramcast.models.released import checkpoint_directory
from vramcast.simulation.sandbox.client import interpreter

GPUMEMNET = "gpumemnet:input:784_output:10_depth:3_arch:pyramid_batch:64.out"
GOOD = json.dumps({"target": GPUMEMNET}).encode()
LONG = "x" * 5000


def line(**values):
    return json.dumps({"target": GPUMEMNET, **values}).encode()


BAD = [
    (b"[" * 100_000, "levels of nesting"),
    (b'{"args":' + b"[" * 200 + b"]" * 200 + b"}", "levels of nesting"),
    (b'{"target": "\xff"}', "invalid start byte"),
    (b'{"batch_size": ' + b"9" * 5000 + b"}", "a number of 5000 characters"),
    (b'{"batch_size": 1e999}', "1e999, which is too large"),
    (b'{"batch_size": NaN}', "NaN, which is no number"),
    (b'{"risk": -Infinity}', "-Infinity, which is no number"),
    (b"[1]", "found a list"),
    (b"null", "found null"),
    (b'"\xe2\x80\xa8"', "found a text"),
    (b"\x0b", "Expecting value at column 1"),
    (b'{"target": "a\x0cb"}', "Invalid control character"),
    (line(batch_size="\N{SUPERSCRIPT TWO}"), "found '\N{SUPERSCRIPT TWO}'"),
    (line(batch_size=True), "found True"),
    (line(batch_size=10**90), "at most"),
    (line(target=LONG), "at most 4096 characters, found 5000"),
    (line(target=f"hf:{LONG}"), "at most 4096 characters"),
    (line(batch_size=1, target="y" * 300 + ".py:make"), "expected a Python file at"),
    (line(target="a\0.py:make"), "a NUL character"),
    (line(target=["a"]), "expected target to be a text"),
    (line(device=7), "expected device to be a text"),
    (line(config=True), "expected config to be a text"),
    (line(config="z" * 300 + ".yaml"), "File name too long"),
    (line(lengths=3), "expected lengths to be a text"),
    (line(lora=5), "expected lora such as"),
    (line(parallel=5), "expected parallel to be a text"),
    (line(checkpointing="every=" + "9" * 4090), "expected checkpointing such as"),
    (line(risk=True), "expected risk to be a number"),
    (line(input="3," + "9" * 30), "at most 2147483648"),
    (line(**{LONG: 1}), "remove or rename them"),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    path = tmp_path_factory.mktemp("jobs") / "jobs.jsonl"
    lines = [GOOD + b"\r", *(item for item, _ in BAD), b"", b" \t\r", GOOD.replace(b"{", b'{"args": {}, ', 1)]
    path.write_bytes(b"\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        out, errors = TextIOWrapper(BytesIO()), StringIO()
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", errors)
        code = main(["--jobs", str(path), "--json"])
    found = [json.loads(item) for item in out.buffer.getvalue().split(b"\n")[:-1]]
    return code, found, errors.getvalue()


def test_every_other_line_is_answered_under_its_number(answers):
    code, found, errors = answers
    assert code == 2
    assert [item["line"] for item in found] == [*range(1, len(BAD) + 2), len(BAD) + 4]
    assert [item["status"] for item in (found[0], found[-1])] == ["ok", "ok"]
    assert found[0]["target"] == found[-1]["target"] == GPUMEMNET
    assert "Traceback" not in errors and f"{len(BAD)} of {len(BAD) + 2} jobs have no answer" in errors


@pytest.mark.parametrize("place", range(len(BAD)))
def test_a_bad_line_is_told_in_a_short_sentence(place, answers):
    found = answers[1][place + 1]
    assert found["status"] == "error"
    assert found["error"].startswith("expected ") and BAD[place][1] in found["error"]
    assert "error of vramcast" not in found["error"] and len(found["error"]) < 6000


def test_a_newline_alone_ends_a_line():
    separators = b"\r \x0b \x0c \x1c \xc2\x85 \xe2\x80\xa8 \xe2\x80\xa9"
    assert list(numbered_lines(b"\na" + separators + b"b\n \t\r\nc")) == [(2, b"a" + separators + b"b"), (4, b"c")]
    text = json.dumps({"target": "\u2028\x85"}, ensure_ascii=False)
    assert parse_object(text.encode(), "here") == {"target": "\u2028\x85"}


def test_jobs_come_from_stdin_too(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(b'{"target": "\xe2\x80\xa8"}\n3')))
    assert main(["--jobs", "-", "--json"]) == 2
    first, second = map(json.loads, capsys.readouterr().out.split("\n")[:-1])
    assert (first["line"], first["target"]) == (1, "\u2028")
    assert (second["line"], second["target"]) == (2, None)


def test_named_specs_end_at_newlines_alone(tmp_path):
    spec = {"family": "timm", "network": {"name": "resnet18"}, "training": {"batch_size": 4}}
    path = tmp_path / "named.jsonl"
    path.write_text(json.dumps({"name": "a\u2028b", "spec": spec}, ensure_ascii=False), encoding="utf-8")
    assert list(read_named_specs(path)) == ["a\u2028b"]
    path.write_bytes(b"\n" + b"[" * 100_000)
    with pytest.raises(UserError, match=r"in line 2 of .*levels of nesting"):
        read_named_specs(path)


def test_a_message_on_the_screen_is_short(capsys):
    for words in (["--batch-size", "9" * 5000, GPUMEMNET], [GPUMEMNET, "--device", "d" * 4000], ["q" * 10**6 + ":r-"]):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert error.startswith("vramcast classify: expected ") and len(error) < 5000 and error.count("\n") == 1


def test_names_too_long_for_a_path_are_unknown_names():
    for find, name in (
        (checkpoint_directory, LONG), (interpreter, LONG), (interpreter, "\0"), (interpreter, "~nobody-here/x"),
        (find_architecture, LONG), (find_architecture, "llama" + "-hf-it-pt-base-chat-v0.1-8k" * 200),
        (parse_target, f"{LONG}.py:make"), (parse_target, f"{LONG}.py"),
    ):  # fmt: skip
        with pytest.raises(UserError, match="expected"):
            find(name)


def test_an_argument_that_is_nested_too_deeply_is_a_text():
    text = "(" * 10_000
    assert parse_argument(f"depth={text}") == ("depth", text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda items: st.lists(items, max_size=3) | st.dictionaries(st.text(max_size=5), items, max_size=3),
    max_leaves=6,
)
TEXTS = st.sampled_from(
    ["", "hf:gpt2", "lora", "lora(r=[1])", "sgd", "every=2", "3,4:5", ",", "ddp", "nf4", "bf16", "t4"]
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.sampled_from(KEYS), JSON | TEXTS, max_size=5), st.booleans())
@example({"lengths": __file__, "input": "", "batch_size": 1}, True)
def test_any_values_are_a_job_or_bad_input(values, has_target):
    values = {"target": "hf:gpt2", **values} if has_target else values
    try:
        request = ClassifyRequest.of(parse_object(json.dumps(values).encode(), "here"))
        request.build_request()
    except UserError as error:
        assert str(error).startswith("expected ")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=30) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_an_object_or_bad_input(data):
    for number, item in numbered_lines(data):
        assert item == data.split(b"\n")[number - 1]
        try:
            assert isinstance(parse_object(item, "here"), dict)
        except UserError as error:
            assert len(str(error)) < 500


@pytest.mark.parametrize("text", ["", ",", "3,²", "٣", "9" * 5000, "3:x", "0"])
def test_a_shape_is_sizes_or_bad_input(text):
    try:
        assert all(size > 0 for size in parse_shape(text)[0])
    except UserError as error:
        assert "expected" in str(error)
