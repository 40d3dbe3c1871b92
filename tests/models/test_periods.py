"""Period finding: the fewest loops and bodies that run a list of layers in order."""

import random
import time

import pytest

from levanter_infer.models.periods import MAX_BODIES, Body, Group, find_periods, run_lengths
from levanter_infer.models.registry import family_for


def shown(layers) -> str:
    return " ".join(f"{''.join(group.period)}*{group.repeats}" for group in find_periods(layers))


@pytest.mark.parametrize(
    "layers, expected",
    [
        ("L" * 32, "L*32"),
        ("L", "L*1"),
        ("WF" * 13, "WF*13"),  # Gemma 2, gpt-oss
        ("WWWF" * 8, "WWWF*8"),  # OLMo 3; Qwen3.5 with other mixers
        ("WWWWWF" * 8, "WWWWWF*8"),
        (("WWWWWF" * 11)[:62], "WWWWWF*10 W*2"),  # Gemma 3 27B
        (("WWWWWF" * 6)[:34], "WWWWWF*5 W*4"),
        (("WWWWWF" * 5)[:26], "WWWWWF*4 W*2"),
        ("DDD" + "E" * 58, "D*3 E*58"),  # DeepSeek-V3
        ("D" + "WF" * 20, "D*1 WF*20"),
        ("WF" * 20 + "G", "WF*20 G*1"),  # a last layer of its own
        ("WWWF" * 5 + "WF", "WWWF*5 WF*1"),
        ("AABB", "A*2 B*2"),
        ("AAAB", "A*3 B*1"),
        ("D" + ("KKKM" * 7)[1:27], "D*1 KKMK*6 K*2"),  # Kimi-Linear
    ],
)
def test_the_pattern_of_a_family_is_found(layers, expected):
    assert shown(layers) == expected


@pytest.mark.parametrize("seed", range(4))
def test_groups_cover_any_list_in_order(seed):
    rng = random.Random(seed)
    for _ in range(60):
        period = "".join(rng.choice("ABC") for _ in range(rng.randint(1, 5)))
        layers = "D" * rng.randint(0, 1) + period * rng.randint(1, 9) + period[: rng.randint(0, 2)]
        groups = find_periods(layers)
        covered = "".join("".join(group.period) * group.repeats for group in groups)
        assert covered == layers
        assert [group.first for group in groups] == [
            sum(before.num_layers for before in groups[:i]) for i in range(len(groups))
        ]
        assert sum(len(group.bodies) for group in groups) <= MAX_BODIES
        for group in groups:
            assert [layer for layer, _ in run(group)] == list(range(group.first, group.first + group.num_layers))
            assert all(layers[layer] == item for layer, item in run(group))
        if any(group.runs is not None or group.cycle is not None for group in groups):
            continue
        assert cost(groups) == cheapest(layers)


def run(group):
    """The layers in the order in which the bodies of a group compute them, each with its body's kind."""
    for trip in range(group.trips):
        for body in group.bodies:
            for further in range(body.counts[trip]):
                yield body.starts[trip] + further, body.item


def cost(groups) -> int:
    return sum(len(group.period) + 1 for group in groups)


def cheapest(layers: str) -> int:
    """The oracle: every way to cut the list, from the end."""
    best = [0] * (len(layers) + 1)
    for start in reversed(range(len(layers))):
        best[start] = min(
            size + 1 + best[start + size * repeats]
            for size in range(1, min(MAX_BODIES, len(layers) - start) + 1)
            for repeats in range(1, (len(layers) - start) // size + 1)
            if layers[start : start + size] * repeats == layers[start : start + size * repeats]
        )
    return best[0]


def test_equal_neighbours_share_a_body_where_there_are_too_many():
    layers = ("M" * 5 + "A" + "M" * 4) * 4  # Granite 4
    groups = find_periods(layers)
    expected = [(0, "MMMMMA", 1, (5, 1)), (6, "MMMMMMMMMA", 3, (9, 1)), (36, "M", 4, None)]
    assert [(g.first, "".join(g.period), g.repeats, g.runs) for g in groups] == expected
    assert groups[1].bodies == (Body("M", (6, 16, 26), (9,) * 3), Body("A", (15, 25, 35), (1,) * 3))
    assert Group(0, ("A", "B"), 2).bodies == (Body("A", (0, 2), (1, 1)), Body("B", (1, 3), (1, 1)))
    assert sum(len(group.bodies) for group in groups) <= MAX_BODIES


@pytest.mark.parametrize(
    "pattern, num_bodies",
    [
        ("AAABC" + "AAAABC" * 3 + "AAAAA", 7),  # Nemotron-H 8B: A is M-, B is M, C is *-
        ("AAABC" * 6 + "AAAA", 6),  # Nemotron Nano 12B v2
        ("AAABAAACAAABAAAABC", 3),  # as Nemotron Nano 9B v2, with kinds that follow in another order
        ("AABCAABCABBCDAACDDABDABCA", 4),
    ],
)
def test_every_list_of_few_kinds_has_bodies(pattern, num_bodies):
    """Where a pattern repeats too little, each kind has one body and counts that differ from trip to trip."""
    groups = find_periods(pattern)
    assert sum(len(group.bodies) for group in groups) == num_bodies
    assert "".join(item for group in groups for _, item in run(group)) == pattern
    assert [layer for group in groups for layer, _ in run(group)] == list(range(len(pattern)))


def test_too_many_bodies_are_refused_with_the_list():
    layers = [0, 0, 0, *range(1, 9)]
    with pytest.raises(ValueError, match=r"11 layers of 9 kinds need 9 layer bodies, .*at most 8.*3 x kind 0, k"):
        find_periods(layers, lambda layers: [f"kind {layer}" for layer in layers])
    with pytest.raises(ValueError, match="a stack of no layers"):
        find_periods([])


def test_a_long_list_takes_no_time():
    start = time.perf_counter()
    assert [len(group.period) for group in find_periods(list("WWWF" * 2500))] == [4]
    assert time.perf_counter() - start < 5


def test_run_lengths_are_readable():
    assert run_lengths(["dense", *["experts"] * 3, "dense"]) == "dense, 3 x experts, dense"
    assert run_lengths(map(str, range(50))).endswith("38, 39 and 10 more")


def test_a_long_list_that_does_not_repeat_takes_no_time():
    """A config.json may say anything of ten thousand layers."""
    rng = random.Random(0)
    kinds = [rng.choice(["full_attention", "sliding_attention"]) for _ in range(10_000)]
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    start = time.perf_counter()
    config = family_for({"model_type": "olmo3"}).config_from_hf(
        {"model_type": "olmo3", **sizes, "num_hidden_layers": 10_000, "layer_types": kinds}
    )
    (group,) = config.groups
    assert [item for _, item in run(group)] == list(config.blocks) and len(group.bodies) == 2
    assert config.stored_at(9_999) == (0, 9_999) and time.perf_counter() - start < 10
