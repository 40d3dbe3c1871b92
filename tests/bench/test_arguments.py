"""Arguments of the benches."""

import re

import pytest

from levanter_infer.bench.__main__ import main


@pytest.mark.parametrize(
    "options",
    [
        ("startup", "--cases", "start,foo"),
        ("attention", "--phases", "foo"),
        ("scenarios", "--cases", "foo"),
        ("throughput", "--modes", "foo"),
        ("memory", "--cases", "foo"),
        ("open-loop", "--cases", "foo"),
    ],
)
def test_a_case_that_does_not_exist_is_refused_with_the_ones_that_do(options, capsys):
    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == 2 and re.search(f"{options[1]}: 'foo' is none of [a-z]+, ", capsys.readouterr().err)
