"""Records come back as written; what is wrong with a file is said in one sentence."""

from __future__ import annotations

import json
import math

import pytest

from normplugin.diagnostics import records
from normplugin.diagnostics.options import DiagnosticsError, check_interval
from normplugin.diagnostics.records import Record
from normplugin.diagnostics.table import text

ONE = Record(10, "decoder", 1, "ffn", "raw_variance", 0.5)
TWO = Record(10, "decoder", 2, "ffn", "raw_variance", None)
RUN = Record(10, "", None, "run", "gradient_norm", 1.5)


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "new" / "d.jsonl"
    records.append(file, [ONE, TWO])
    return file


def test_round_trip_and_append(path):
    """Appended records follow; each line is one JSON object that carries the schema."""
    records.append(path, [RUN])
    assert records.read(path) == ([ONE, TWO, RUN], [])
    assert {json.loads(line)["schema"] for line in path.read_text().splitlines()} == {1}


def test_what_a_resumed_run_repeats_replaces_what_stood_there(path):
    """The later line counts."""
    again = Record(10, "decoder", 1, "ffn", "raw_variance", 0.75)
    records.append(path, [again])
    assert records.read(path)[0] == [again, TWO]


def test_a_cut_line_is_reported_and_healed_by_the_next_append(path):
    """Reading leaves it out and says so; appending removes it."""
    with path.open("a") as file:
        file.write('{"schema": 1, "upda')
    found, warnings = records.read(path)
    assert found == [ONE, TWO]
    assert warnings == [f"{path}: its last line was cut short and is left out."]
    records.append(path, [RUN])
    assert records.read(path) == ([ONE, TWO, RUN], [])
    path.write_text('{"sch')
    records.append(path, [RUN])
    assert records.read(path) == ([RUN], [])


def test_nan_is_kept_and_reported(path):
    """One sentence with how many and the first place."""
    records.append(path, [Record(20, "decoder", 3, "stream", "variance", math.nan)])
    found, warnings = records.read(path)
    assert math.isnan(found[-1].value)
    assert warnings == [
        f"{path}: 1 values are not finite, the first at update 20: layer 3, stream, variance."
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"schema": 2, "update": 1}', r":3: got schema 2; this normplugin reads schema 1\."),
        ('{"schema": 1, "update": 1}', r":3: got '\{\"schema\": 1, \"update\": 1\}'; legal are"),
        ("iteration 3 | loss 2", r":3: got 'iteration 3 \| loss 2'; legal are JSON lines"),
    ],
)
def test_foreign_lines_are_refused(path, line, message):
    """Another schema, or something else altogether: which line, and what it reads."""
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DiagnosticsError, match=message):
        records.read(path)


def test_files_that_cannot_be_read_or_written(tmp_path):
    """One sentence each."""
    with pytest.raises(DiagnosticsError, match=r"none\.jsonl: got a file that cannot be read"):
        records.read(tmp_path / "none.jsonl")
    (tmp_path / "file").touch()
    with pytest.raises(DiagnosticsError, match=r"records: got .*; writing it failed"):
        records.append(tmp_path / "file" / "d.jsonl", [ONE])


@pytest.mark.parametrize("value", ["0", "-3", "1.5", "often", None])
def test_intervals_are_whole_numbers_from_1_on(value):
    """Anything else is refused with a number to try."""
    assert check_interval("20") == 20
    with pytest.raises(DiagnosticsError, match=r"--diagnostics-interval: got .* Try 100\."):
        check_interval(value)


def test_the_table_says_skipped(path):
    """A layer that was skipped is no zero."""
    lines = text([ONE, TWO, RUN]).splitlines()
    assert [line.split() for line in lines[2:4]] == [["1", "0.5"], ["2", "skipped"]]
    assert lines[-1] == "gradient norm of the whole model: 1.5"
