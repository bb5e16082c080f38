"""Writing and reading a journal, and checking its settings."""

import json
import subprocess
import sys
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from journals import BUILD, make_rejection, make_row, write

from vramcast.dataset_builder.rows import SCHEMA_VERSION, Rejection, Row
from vramcast.dataset_builder.store import JournalWriter, iter_records, read_header, read_journal, repair
from vramcast.dataset_builder.store.lines import encode_line
from vramcast.errors import UserError
from vramcast.virtual_gpu.measurement import Measurement, Status

# --- writing and reading ---


def test_round_trip(tmp_path):
    with JournalWriter(tmp_path / "a" / "b", BUILD) as writer:
        writer.append(make_row(1))
        writer.append(make_rejection(2))
        writer.append(make_row(3))
        assert (len(writer.row_ids), len(writer.rejected_ids), writer.torn) == (2, 1, None)
    journal = read_journal(tmp_path / "a" / "b")
    assert journal.rows == [make_row(1), make_row(3)]
    assert journal.rejections == [make_rejection(2)]
    assert (journal.header.schema, journal.header.build, journal.torn) == (SCHEMA_VERSION, BUILD, None)
    assert list(iter_records(journal.path)) == [make_row(1), make_rejection(2), make_row(3)]


def test_lines_are_json_with_a_checksum_of_the_preceding_bytes(tmp_path):
    raws = write(tmp_path, [1, 2]).read_bytes().splitlines()
    assert [json.loads(raw)["type"] for raw in raws] == ["header", "row", "row"]
    for raw in raws:
        body, _, rest = raw.rpartition(b',"crc32":')
        assert rest == b'"%08x"}' % zlib.crc32(body)


def test_a_resumed_journal_has_its_ids(tmp_path):
    write(tmp_path, [1, 2])
    with JournalWriter(tmp_path, BUILD) as writer:
        assert writer.row_ids == {make_row(1).spec.id, make_row(2).spec.id}
        writer.append(make_rejection(7))
    with JournalWriter(tmp_path, BUILD) as writer:
        assert writer.rejected_ids == {make_rejection(7).spec.id}
    assert len(read_journal(tmp_path).rows) == 2


def test_an_id_is_written_once(tmp_path):
    with JournalWriter(tmp_path, BUILD) as writer:
        writer.append(make_row(1))
        with pytest.raises(ValueError, match="already"):
            writer.append(make_row(1))
        with pytest.raises(ValueError, match="already"):
            writer.append(Rejection(make_row(1).spec, "late"))
    assert len(read_journal(tmp_path).rows) == 1


def test_values_that_are_not_json_are_refused_before_writing(tmp_path):
    row = make_row(1)
    bad = Row(row.spec, None, Measurement(status=Status.OK, seconds=float("nan")), row.provenance)
    with JournalWriter(tmp_path, BUILD) as writer:
        with pytest.raises(ValueError, match="JSON"):
            writer.append(bad)
        writer.append(row)
    assert read_journal(tmp_path).rows == [row]


def test_writing_needs_the_with_block(tmp_path):
    writer = JournalWriter(tmp_path, BUILD)
    with pytest.raises(RuntimeError, match="with"):
        writer.append(make_row(1))
    with writer:
        writer.append(make_row(1))
    with pytest.raises(RuntimeError, match="with"):
        writer.append(make_row(2))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
any_text = st.text(st.characters(exclude_categories=()))  # halves of surrogate pairs, too


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    networks=st.lists(st.dictionaries(any_text, values | any_text, max_size=3), min_size=1, max_size=4),
    evidence=any_text | st.sampled_from(['"}\n{"', "\x00", "\u2028", "\r\n", ',"crc32":"00000000"}']),
)
def test_odd_values_survive(no_sync, tmp_path_factory, networks, evidence):
    directory = tmp_path_factory.mktemp("odd")
    rows = [make_row(i, {"odd": network}, evidence) for i, network in enumerate(networks)]
    with JournalWriter(directory, {"note": evidence}) as writer:
        for row in rows:
            writer.append(row)
    journal = read_journal(directory)
    assert journal.rows == rows
    assert journal.header.build == {"note": evidence}


# --- settings, versions, paths ---


def test_other_settings_are_refused_by_name(tmp_path):
    write(tmp_path, [1])
    settings = {"seed": 2, "n": 10, "family": {"name": "cnn"}, "extra": None}
    with pytest.raises(UserError) as caught, JournalWriter(tmp_path, settings):
        pass
    text = str(caught.value)
    assert "seed=2 (it was 1)" in text
    assert "family.name='cnn' (it was 'mlp')" in text
    assert "extra=None (it was 'nothing')" in text
    assert "another out=DIR" in text


def test_a_long_list_of_differences_is_shortened(tmp_path):
    factors = [[f"factor{i}", {"choice": list(range(99))}] for i in range(20)]
    write(tmp_path, [1], {"space": {"factors": factors}})
    changed = [[name, {"choice": [*item["choice"], 100]} if name == "factor7" else item] for name, item in factors]
    with pytest.raises(UserError) as caught, JournalWriter(tmp_path, {"space": {"factors": changed}}):
        pass
    assert "found space.factors.factor7.choice=[0, 1, 2" in str(caught.value)
    assert "factor8" not in str(caught.value)
    with (
        pytest.raises(UserError, match=r"found space.factors=\['factor19', ") as caught,
        JournalWriter(tmp_path, {"space": {"factors": factors[::-1]}}),
    ):
        pass
    assert len(str(caught.value)) < 600
    with pytest.raises(UserError, match="and 18 more: use the same"), JournalWriter(tmp_path, {"seed": 1}):
        pass


def test_a_journal_without_rows_may_get_other_settings(tmp_path):
    write(tmp_path, [], {"seed": 1})
    path = write(tmp_path, [1], {"seed": 2})
    assert read_header(path).build == {"seed": 2}
    assert len(read_journal(path).rows) == 1


def test_a_build_may_be_extended(tmp_path):
    write(tmp_path, [1])
    with JournalWriter(tmp_path, {**BUILD, "n": 99}) as writer:
        writer.append(make_row(2))
    assert len(read_journal(tmp_path).rows) == 2


def test_settings_are_compared_as_json(tmp_path):
    for levels in ((1, 2), [1, 2]):
        with JournalWriter(tmp_path, {"levels": levels}):
            pass


@pytest.mark.parametrize(
    ("version", "fix"), [(SCHEMA_VERSION + 1, "newer"), (SCHEMA_VERSION - 1, "again"), (None, "again")]
)
def test_other_versions_are_refused(tmp_path, version, fix):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(encode_line("header", {"schema": version, "build": BUILD}) + b"what the future holds\n" * 2)
    for act in (read_journal, repair, lambda path: list(iter_records(path)), lambda path: write(path, [1])):
        with pytest.raises(UserError, match=f"expected schema {SCHEMA_VERSION} .*{fix}"):
            act(tmp_path)


def test_a_missing_journal_lists_the_directory(tmp_path):
    for name in ("notes.txt", "b.csv"):
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=r"expected a build directory .*found only \['b.csv', 'notes.txt'\]"):
        read_journal(tmp_path)
    with pytest.raises(UserError, match="found no such file"):
        iter_records(tmp_path / "absent")
    assert not (tmp_path / "lock").exists()


def test_a_directory_that_cannot_be_created_is_one_error(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match="choose another out=DIR"),
        JournalWriter(tmp_path / "file" / "x", BUILD),
    ):
        pass


def test_the_journal_imports_neither_pandas_nor_torch():
    code = "import sys, dataset_builder.store as _; sys.exit(bool({'pandas', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
