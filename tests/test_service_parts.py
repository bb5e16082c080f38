"""The parts of the service that need no application: the cache, the batcher, jobs as text."""

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramcast.collocation.adapters.job_text import job_of_text
from vramcast.collocation.service.batcher import Batcher
from vramcast.collocation.service.byte_cache import ByteCache, content_key
from vramcast.errors import UserError


def test_keys_depend_on_the_lengths_of_parts() -> None:
    assert content_key(b"ab", b"c") != content_key(b"a", b"bc")
    assert content_key(b"a") == content_key(b"a")


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 600)), max_size=60), st.integers(0, 3000))
def test_a_cache_never_exceeds_its_limit(puts: list[tuple[int, int]], limit: int) -> None:
    cache = ByteCache(limit)
    for key, size in puts:
        cache.put(bytes([key]), b"x" * size)
        assert cache.size_bytes <= limit
    kept = {key: cache.get(bytes([key])) for key in range(21)}
    assert cache.size_bytes == sum(len(value) + 200 for value in kept.values() if value is not None)
    assert len(cache) == sum(value is not None for value in kept.values())


def test_the_least_recently_used_entries_are_dropped() -> None:
    cache = ByteCache(3 * 201)
    for key in (b"a", b"b", b"c"):
        cache.put(key, b"x")
    cache.get(b"a")
    cache.put(b"d", b"x")
    assert [key for key in (b"a", b"b", b"c", b"d") if cache.get(key)] == [b"a", b"c", b"d"]
    cache.clear()
    assert (len(cache), cache.size_bytes) == (0, 0)


def test_questions_that_arrive_during_a_batch_form_the_next() -> None:
    started, go, sizes = threading.Event(), threading.Event(), []

    def answer(questions: object) -> list[int]:
        response = list(questions)  # type: ignore[call-overload]
        sizes.append(len(response))
        started.set()
        go.wait(5)
        return [2 * item for item in response]

    async def scenario() -> None:
        batcher: Batcher[int, int] = Batcher(answer, largest=4)
        first = asyncio.create_task(batcher.ask(0))
        await asyncio.to_thread(started.wait, 5)
        others = [asyncio.create_task(batcher.ask(index)) for index in range(1, 7)]
        await asyncio.sleep(0)
        go.set()
        assert await asyncio.gather(first, *others) == [0, 2, 4, 6, 8, 10, 12]
        batcher.close()

    asyncio.run(scenario())
    assert sizes == [1, 4, 2]


def test_a_bad_question_does_not_fail_its_batch() -> None:
    def answer(questions: object) -> list[int]:
        response = list(questions)  # type: ignore[call-overload]
        if 3 in response:
            raise UserError("expected another, found 3")
        return response

    async def scenario() -> None:
        batcher: Batcher[int, int] = Batcher(answer, largest=10)
        response = await asyncio.gather(*(batcher.ask(index) for index in range(6)), return_exceptions=True)
        assert [item for item in response if not isinstance(item, Exception)] == [0, 1, 2, 4, 5]
        assert isinstance(response[3], UserError)
        batcher.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("text", ["", " ", "{", '{"a": NaN}', "[" * 10, "x" * 300_000])
def test_odd_texts_are_names_or_refused(text: str) -> None:
    try:
        assert job_of_text(text) == {"name": text}
    except UserError as error:
        assert "expected a job" in str(error)
