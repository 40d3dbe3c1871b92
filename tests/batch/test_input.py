"""How an input is divided, and that a change of it is noticed."""

import bz2
import gzip
import json
import lzma

import pytest

from levanter_infer.batch.input import Input, InputShards
from levanter_infer.io.prompts import MAX_LINE_BYTES, row_id


def make_input(path, **changes) -> Input:
    return Input(str(path), **{"as_chat": False, "model_names": (), **changes})


def contents(source: Input, inputs: InputShards):
    return [[content for _, content in source.rows(inputs, shard)] for shard in inputs.shards]


def write_rows(path, count, first=0):
    path.write_text("".join(json.dumps({"prompt": f"p{first + i}"}) + "\n" for i in range(count)))


def test_shards_hold_every_row_once_in_order(tmp_path):
    write_rows(tmp_path / "b.jsonl", 7, first=5)
    write_rows(tmp_path / "a.jsonl", 5)
    source = make_input(tmp_path / "*.jsonl")
    inputs = source.split(3)
    assert [(s.index, s.file, s.first_row, s.rows) for s in inputs.shards] == [
        *((0, 0, 0, 3), (1, 0, 3, 2)),
        *((2, 1, 5, 3), (3, 1, 8, 3), (4, 1, 11, 1)),
    ]
    assert inputs.rows == 12 and InputShards.from_dict(json.loads(json.dumps(inputs.as_dict()))) == inputs
    rows = contents(source, inputs)
    assert [row["prompt"] for shard in rows for row in shard] == [f"p{i}" for i in range(12)]


def test_blank_and_overlong_lines_a_byte_order_mark_and_no_newline_at_the_end(tmp_path):
    long = b'{"prompt": "' + b"x" * (2 * MAX_LINE_BYTES + 5) + b'"}'
    lines = [b'\xef\xbb\xbf{"prompt": "a"}', b"", b"  ", long, b"{", b'{"prompt": "b"}', b"", b'{"prompt": "c"}']
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
    source = make_input(tmp_path / "in.jsonl")
    inputs = source.split(2)
    rows = [row for shard in inputs.shards for row in source.rows(inputs, shard)]
    assert [where for where, _ in rows] == [f"in.jsonl:{line}" for line in (1, 4, 5, 6, 8)]
    assert [row if isinstance(row, dict) else isinstance(row, ValueError) and ValueError for _, row in rows] == [
        *({"prompt": "a"}, ValueError, ValueError, {"prompt": "b"}, {"prompt": "c"})
    ]
    assert "longer than" in str(rows[1][1]) and "not JSON" in str(rows[2][1])


def test_a_byte_order_mark_before_a_blank_line_is_no_row(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(b'\xef\xbb\xbf\n{"prompt": "a"}\n')
    source = make_input(tmp_path / "in.jsonl")
    assert contents(source, source.split(2)) == [[{"prompt": "a"}]]


def test_a_name_with_brackets_is_a_file_if_there_is_one(tmp_path):
    write_rows(tmp_path / "in[1].jsonl", 2)
    write_rows(tmp_path / "in1.jsonl", 3)
    assert make_input(tmp_path / "in[1].jsonl").split(9).rows == 2
    assert make_input(tmp_path / "in[0-9].jsonl").split(9).rows == 3


def test_the_id_of_a_line_of_openais_format_is_its_custom_id(tmp_path):
    """A row with a body is such a line, whatever `id` it has; the id of one without a `custom_id` is unknown."""
    rows = [{"id": "a", "body": {}}, {"prompt": "x", "id": "0"}, {"prompt": "x", "id": "a"}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert make_input(tmp_path / "in.jsonl").split(9).rows == 3
    rows = [{"custom_id": "0", "body": {}}, {"prompt": "x", "id": "0"}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match="two rows have the id '0' in in.jsonl:1 and in.jsonl:2: ids must differ"):
        make_input(tmp_path / "in.jsonl").split(9)
    rows = [{"id": "1", "body": {}}, {"prompt": "x"}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert make_input(tmp_path / "in.jsonl").split(9).rows == 2


@pytest.mark.parametrize("broken", ['{"prompt": "x"', '{"prompt": "x", "id": [1]}', '{"id": "x", "body": {}}', "7"])
def test_a_row_whose_id_is_unknown_differs_from_those_that_are_numbers(tmp_path, broken):
    """Its number is the id of another one."""
    rows = [*(json.dumps({"prompt": "x", "id": i}) for i in (1, 2, 3)), broken, json.dumps({"prompt": "x", "id": 5})]
    (tmp_path / "in.jsonl").write_text("\n".join(rows))
    inputs = make_input(tmp_path / "in.jsonl").split(9)
    assert inputs.rows == 5 and inputs.named and InputShards.from_dict(inputs.as_dict()) == inputs
    read = [content for _, content in make_input(tmp_path / "in.jsonl").rows(inputs, inputs.shards[0])]
    assert [row_id(row, i, named=True) for i, row in enumerate(read)] == ["1", "2", "3", "row 3", "5"]
    assert row_id(read[3], 3, named=False) == "3"  # in a job in which no row gives itself an id


@pytest.mark.parametrize("suffix", ["jsonl", "txt"])
def test_a_line_that_is_too_long_is_a_row_even_if_its_start_is_blank(tmp_path, suffix):
    path = tmp_path / f"in.{suffix}"
    row = '{"prompt": "y", "id": "b"}' if suffix == "jsonl" else "y"
    path.write_text(" " * (MAX_LINE_BYTES + 5) + row + "\n" + row + "\n")
    source = make_input(path)
    inputs = source.split(9)
    first, second = (content for _, content in source.rows(inputs, inputs.shards[0]))
    assert "longer than 16777216 bytes" in str(first) and second["prompt"] == "y"


@pytest.mark.parametrize("ending", ["\n\n \n", ""])
def test_blank_lines_at_the_end_belong_to_no_shard(tmp_path, ending):
    (tmp_path / "in.txt").write_text("one\ntwo\n\nthree\n" + ending)
    source = make_input(tmp_path / "in.txt")
    for size in (2, 3):
        inputs = source.split(size)
        assert [c["prompt"] for shard in contents(source, inputs) for c in shard] == ["one", "two", "three"]


def test_compressed_text_is_divided_as_plain_text(tmp_path):
    write_rows(tmp_path / "in.jsonl", 9)
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress((tmp_path / "in.jsonl").read_bytes()))
    plain, packed = make_input(tmp_path / "in.jsonl"), make_input(tmp_path / "in.jsonl.gz")
    inputs = packed.split(4)
    assert inputs.shards == plain.split(4).shards
    assert contents(packed, inputs) == contents(plain, inputs)


@pytest.mark.parametrize("suffix, pack", [("bz2", bz2.compress), ("xz", lzma.compress)])
def test_streams_behind_the_first_are_read_or_refused(tmp_path, suffix, pack):
    write_rows(tmp_path / "in.jsonl", 9)
    lines = (tmp_path / "in.jsonl").read_bytes().splitlines(keepends=True)
    path = tmp_path / f"in.jsonl.{suffix}"
    first, second = pack(b"".join(lines[:5])), pack(b"".join(lines[5:]))
    path.write_bytes(first + bytes(8) + pack(b"") + second + bytes(4))
    plain, packed = make_input(tmp_path / "in.jsonl"), make_input(path)
    inputs = packed.split(4)
    assert inputs.shards == plain.split(4).shards
    backwards = [list(packed.rows(inputs, shard)) for shard in reversed(inputs.shards)]
    assert [[content for _, content in rows] for rows in reversed(backwards)] == contents(plain, plain.split(4))
    for damaged in (first + b"x" + second, first + second[:-9], first + second + b"{}\n", first[:-9], b""):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"cannot read .*in.jsonl.{suffix}.*damaged"):
            make_input(path).split(4)


@pytest.mark.parametrize("change", ["a byte", "fewer rows"])
def test_a_shard_that_has_changed_is_not_given_out_whole(tmp_path, change):
    path = tmp_path / "in.jsonl"
    write_rows(path, 6)
    source = make_input(path)
    inputs = source.split(3)
    text = path.read_text()
    path.write_text(text.replace("p4", "q4") if change == "a byte" else text[: text.index("p4") - 13])
    assert len(list(source.rows(inputs, inputs.shards[0]))) == 3  # this one has not
    given = []
    with pytest.raises(ValueError, match="in.jsonl has changed since the job began"):
        given.extend(source.rows(inputs, inputs.shards[1]))
        raise AssertionError(given)
    assert len(given) < 3


@pytest.mark.parametrize("repeated", ["a", "1"])
def test_ids_that_are_not_unique_stop_a_job_before_it_begins(tmp_path, repeated):
    rows = [{"prompt": "x", "id": "a"}, {"prompt": "x"}, {"prompt": "x", "id": 7}, {"prompt": "x", "id": repeated}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    where = {"a": "in.jsonl:1 and in.jsonl:4", "1": "in.jsonl:2 and in.jsonl:4"}[repeated]
    with pytest.raises(ValueError, match=f"two rows have the id '{repeated}' in {where}: ids must differ"):
        make_input(tmp_path / "in.jsonl").split(2)


def test_what_is_no_input_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "in.csv").write_text("a,b")
    for name, message in {
        "none.jsonl": "no such file",
        "none*.jsonl": "no such file",
        "in.csv": "expected a name that ends in .jsonl",
        "empty.jsonl": "no rows",
    }.items():
        with pytest.raises(ValueError, match=message):
            make_input(tmp_path / name).split(2)
    with pytest.raises(ValueError, match="cannot open 'nosuch://x'"):
        make_input("nosuch://x")


def test_text_prompts_become_chats_where_asked(tmp_path):
    (tmp_path / "in.txt").write_text("hello\n")
    source = make_input(tmp_path / "in.txt", as_chat=True)
    assert contents(source, source.split(1)) == [[{"messages": [{"role": "user", "content": "hello"}]}]]
