"""The format of messages between parents and children, however a pipe cuts them."""

import json
import pickle
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramcast.child.messages import Decoder, encode
from vramcast.child.process import Child, ChildEndedError, ChildTimeoutError, Limits, module_command

MESSAGES = [
    ({"event": "ready"}, None),
    ({"event": "done", "n": 1}, b"\n{}\n\x80"),
    ({"event": "é\n"}, b""),
    ({"event": 1}, None),
]


@given(st.lists(st.integers(0, 200), max_size=12))
def test_messages_arrive_whole_however_they_are_cut(cuts):
    data = b"".join(encode(message, payload) for message, payload in MESSAGES)
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    decoder = Decoder(1000, "event")
    arrived = [item for a, b in pairwise(bounds) for item in decoder.feed(data[a:b])]
    expected = [{**message, "payload": payload} if payload is not None else message for message, payload in MESSAGES]
    assert (arrived, decoder.fault) == (expected, None)


@pytest.mark.parametrize(
    "line",
    [b"no json", b"[1]", b'{"do": 1}', b'{"event": 1, "payload": -1}', b'{"event": 1, "payload": 1001}',
     b'{"event": 1, "payload": true}', b"\xff\x00", b'{"event": 1, "payload": "x"}'],
)  # fmt: skip
def test_another_line_is_a_fault_and_ends_the_reading(line):
    decoder = Decoder(1000, "event")
    assert decoder.feed(b'{"event": 0}\n' + line + b'\n{"event": 2}\n') == [{"event": 0}]
    assert decoder.fault is not None and decoder.fault.startswith("the child's answer is not a report")


def test_a_message_without_an_end_is_a_fault():
    decoder = Decoder(1000)
    assert decoder.feed(b"x" * 1000) == [] and decoder.fault is None
    assert decoder.feed(b"x") == [] and decoder.fault == "the child's answer is too long (over 1000 bytes)"


SERVER = """
import os, sys
from vramcast.child.channel import Channel
channel = Channel(int(sys.argv[-1]))
print("a word", flush=True)
channel.serve(lambda request: ({"event": "done", "input": sys.stdin.read(), **request}, request.get("payload")))
os._exit(3)
"""


def test_a_child_answers_each_request_and_its_end_has_words(tmp_path):
    (tmp_path / "server.py").write_text(SERVER)
    with Child([sys.executable, str(tmp_path / "server.py")], {}, 2**20) as child:
        data = pickle.dumps(list(range(50_000)))  # more than a pipe takes
        answer = child.ask({"do": "x"}, Limits(), data)
        assert (answer["event"], answer["do"], answer["input"], answer["payload"]) == ("done", "x", "", data)
        limits = Limits()
        limits.extend(0.2)
        with pytest.raises(ChildTimeoutError):
            list(child.follow(limits))
        child.close_requests()
        with pytest.raises(ChildEndedError, match="the child ended with exit code 3: a word"):
            list(child.follow(Limits()))


def test_an_interpreter_without_torch_answers_with_a_sentence(tmp_path):
    with Child(module_command("vramcast.child.process", flags=["-S", "-I"]), {}, 2**20) as child:
        message = next(child.follow(Limits()))
    assert json.dumps(message).startswith('{"event": "refused", "reason": "expected torch in ')
