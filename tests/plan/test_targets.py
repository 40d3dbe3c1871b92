"""Machines by name."""

import pytest

from levanter_infer.plan.targets import larger, parse_target


@pytest.mark.parametrize(
    "name, chips, topology",
    [
        ("v5e-16", 16, "v5e:4x4"),
        ("v5litepod-8", 8, "v5e:2x4"),
        ("v5p-16", 8, "v5p:2x2x2"),
        ("v4-8", 4, "v4:2x2x1"),
        ("v6e-4", 4, "v6e:2x2"),
        ("v6e-1", 1, "v6e:2x2"),
        ("h100", 1, None),
        ("a100-40x4", 4, None),
        ("cpu", 1, None),
        ("cpux4", 4, None),
    ],
)
def test_a_name_says_how_many_chips(name, chips, topology):
    target = parse_target(name)
    assert (target.num_chips, target.topology) == (chips, topology)
    assert target.chip.memory_bytes > 2**30
    assert (target.chip.memory_gbps > 0) == (target.chip.platform != "cpu")


@pytest.mark.parametrize(
    "name, message",
    [
        ("v5e-5", "no such slice; expected v5e-1, v5e-4, v5e-8"),
        ("v5p-6", "no such slice; expected v5p-8, v5p-16"),
        ("v7x-8", "'v7x-8' is not known; expected a machine such as"),
        ("h10", "such as h100"),
        ("", "is not known"),
        ("cpux0", "is not known"),
    ],
)
def test_a_name_of_nothing_is_refused_with_names_that_are_known(name, message):
    with pytest.raises(ValueError, match=message):
        parse_target(name)


def test_larger_targets_are_of_the_same_kind():
    assert [each.name for each in larger(parse_target("v5p-16"))][:2] == ["v5p-32", "v5p-64"]
    assert [each.name for each in larger(parse_target("h100x2"))] == ["h100x4", "h100x8"]
    assert larger(parse_target("cpu")) == []
