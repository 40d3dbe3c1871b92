"""Many devices: the results of one. Devices are forced in a process of their own (`tests.mesh_runs`)."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import haliax as hax
import jax
import numpy as np
import pytest

from levanter_infer.axes import DATA, EMBED, HEAD_SIZE, KV_HEADS, LAYERS, MODEL, Q_HEADS_PER_GROUP, VOCAB
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.mesh import MeshConfig, in_rings, make_mesh
from levanter_infer.engine.runner import Gather
from levanter_infer.engine.stats import RankSteps
from levanter_infer.kernels.cpu import bindings as cpu
from levanter_infer.layers.layout import Layout
from tests.tiny_models import tiny_model

ROOT = Path(__file__).resolve().parents[2]
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
           "norm_topk_prob": True}  # fmt: skip
LAYOUTS = ("data2", "data4", "model2", "model4", "data2_model2", "data2_model4", "data4_model2", "data4_model4")
MOST_LOGPROB_DIFFERENCE = 2e-4
"""Logits of these models reach 50 and are sums of float32 in another order."""


def runs(*cases: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.mesh_runs", *cases],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check_same(one: dict, many: dict) -> None:
    """Tokens are equal; they might differ where the two likeliest are nearly alike, and here they do not."""
    assert one["errors"] == many["errors"] == []
    assert many["tokens"] == one["tokens"] and many["reasons"] == one["reasons"]
    assert many["top"] == one["top"]
    for ours, theirs in zip(many["logprobs"], one["logprobs"], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=MOST_LOGPROB_DIFFERENCE)
    assert many["free"][0] == many["free"][1] and many.get("live_bytes", 0) == 0


def check_two_shards_of_two_devices(one: dict, many: dict) -> None:
    check_same(one, many)
    assert many["shards"] == 2 and one["shards"] == 1
    assert many["hits"] > 0  # what begins alike went to one shard
    assert many["pool"] == ["(1, 2, 60, 4, 2, 8)"]  # one shard, all layers and pages, one of two heads
    assert many["weights"] == ["(2, 32, 1, 2, 8)", "(2, 32, 32)"]
    assert set(many["idle_share"]) == {"0", "1"} and all(0 <= share < 0.6 for share in many["idle_share"].values())
    assert one["idle_share"] is None


@pytest.mark.slow  # CI has the same on two processes: tests/engine/test_hosts.py
def test_two_shards_of_two_devices_give_the_tokens_of_one_device():
    found = runs("some_one", "some_data2_model2")
    check_two_shards_of_two_devices(found["some_one"], found["some_data2_model2"])
    assert found["some_data2_model2"]["live_bytes"] == 0


def check_sampled(found: dict) -> None:
    assert all(found["equal_ids"]) and found["largest_difference"] < 1e-4
    assert found["distinct_tokens"] > 5


@pytest.mark.slow
@pytest.mark.parametrize("case", ["sample_2_61", "sample_4_61", "sample_8_1000", "sample_4_11", "kernels_4_8400"])
def test_logits_in_parts_give_the_samples_of_whole_ones(case):
    check_sampled(runs(case)[case])


@pytest.mark.slow
def test_kernels_that_read_whole_rows_sample_no_part_of_one():
    """A GPU's kernels are asked with two devices, which have 300 logits of each row; XLA samples."""
    check_sampled(runs("rowkernels_2_600")["rowkernels_2_600"])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", LAYOUTS)
def test_two_hundred_requests_get_the_tokens_of_one_device(mesh):
    found = runs("many_one", f"many_{mesh}")
    check_same(found["many_one"], found[f"many_{mesh}"])


@pytest.mark.slow
def test_a_checkpoint_is_read_into_its_parts():
    cases = ["loaded_data2_model4", "loaded_model2", "loadedexperts_model2_expert2", "loadedexperts_data2_expert4"]
    cases += ["loadedlatents_data2_model4", "loadedlatents_model2"]
    found = runs(*cases)
    check_loaded(*found.values())
    assert [each["experts"] for each in found.values()] == [[], [], list(range(8)), list(range(8)), [], []]


def check_loaded(*found: dict) -> None:
    assert all(each["same_places"] and each["same_bits"] and each["twice"] == 0 for each in found)


@pytest.mark.slow
def test_groups_that_devices_share_unevenly_and_functions_of_the_head():
    found = runs("heads_one", "heads_model4")
    check_same(found["heads_one"], found["heads_model4"])
    assert found["heads_model4"]["weights"][0] == "(2, 48, 1, 3, 8)"


@pytest.mark.slow
def test_latents_are_on_every_device_and_query_heads_are_sharded():
    """Six heads over two and over four devices, with a `score_mod` that sees their numbers in the model."""
    found = runs("latents_one", "latents_model2", "latents_model4")
    for mesh in ("model2", "model4"):
        check_same(found["latents_one"], found[f"latents_{mesh}"])


@pytest.mark.slow
def test_norms_over_the_heads_of_all_devices():
    found = runs("wholenorm_one", "wholenorm_model2", "wholenorm_model4")
    for mesh in ("model2", "model4"):
        check_same(found["wholenorm_one"], found[f"wholenorm_{mesh}"])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["experts_expert4", "experts_model2_expert2", "experts_data2_model2_expert2"])
def test_experts_on_devices_of_their_own_give_the_tokens_of_one_device(case):
    found = runs("experts_one", case)
    check_same(found["experts_one"], found[case])
    layers, experts, width, _ = json.loads(found[case]["weights"][1].replace("(", "[").replace(")", "]"))
    assert (layers, experts) == (2, 8 // int(case[-1])) and width == (24 if case == "experts_expert4" else 12)


@pytest.mark.slow
def test_routed_experts_are_those_of_one_device():
    one, *many = runs("routed_one", "routed_expert4", "routed_data2_model2").values()
    assert {expert for sample in one["experts"] for expert in np.asarray(sample).flat} == {*range(8)}
    assert many == [one, one]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["biased", "sinks"])
def test_biases_of_experts_and_of_their_choice_act_once_on_a_mesh(kind):
    cases = [f"{kind}_{mesh}" for mesh in ("expert2", "model2", "model2_expert2")]
    one, *many = runs(f"{kind}_one", *cases).values()
    for found in many:
        check_same(one, found)


@pytest.mark.slow
def test_weights_that_are_stored_as_on_a_tpu_give_the_tokens_of_one_device():
    one, *many = runs("sinks_one", "filled_one", "filled_model2", "filled_model2_expert2").values()
    for found, parts, experts in zip(many, (1, 2, 2), (8, 8, 4), strict=True):
        check_same(one, found)
        # Of 32 inputs of experts, and of 2 kv heads with 2 query heads of 8 each.
        assert found["weights"] == [f"(2, 32, {32 // parts})", f"(2, {experts}, {24 // parts}, 40)"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["some_model2", "some_model4", "some_data2_model4", "heads_model4", "biases_model8"])
def test_columns_of_the_residual_stream_on_a_ring_give_the_tokens_of_one_device(case):
    one, many = runs(f"{case.split('_')[0]}_one", f"ring{case}").values()
    check_same(one, many)
    assert many["ring_parts"] == [int(case[-1])]


@pytest.mark.slow
def test_experts_have_no_ring():
    assert runs("ringexperts_model4")["ringexperts_model4"]["ring_parts"] == [1]


def check_swapped(found: dict) -> None:
    assert found["wrong"] == 0 and found["tokens"] == 4 * 5 * 12
    assert found["versions"] == [0, 1, 2, 3] and found["mixed"] > 3
    assert not found["moved"] and found["free"][0] == found["free"][1]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["swapped_data2_model2", "swapped_model4"])
def test_weights_that_change_give_each_token_its_version(case):
    found = runs(case)[case]
    check_swapped(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["looked_data2_model4", "lookedlatents_model2", "lookedtwosizes_data2", "lookedtwosizes_model2"]
)
def test_a_look_inside_finds_the_keys_and_values_of_a_rank_and_of_layers_of_two_sizes(case):
    found = runs(case)[case]
    assert "all layers store the right keys and values" in found["own"]
    sides = "latents" if "latents" in case else "keys and values"
    assert f"layer 0 is the first to store wrong ones: {sides} of all heads" in found["other"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["slept_data2_model2", "slept_model4"])
def test_an_engine_on_a_mesh_sleeps_and_takes_weights_from_another_mesh(case):
    check_slept(runs(case)[case])


def check_slept(found: dict) -> None:
    assert found["tokens"] == found["expected"] and found["swapped"] == found["swapped_expected"]
    assert found["freed"] and not found["moved"] and set(found["programs"].values()) == {1}
    assert found["free"][0] == found["free"][1]


@pytest.mark.slow
def test_prompts_are_scored_searches_made_and_samples_forked_on_every_shard():
    found = runs("studied_one", "studied_data2", "studied_data2_model2")
    for case in ("studied_data2", "studied_data2_model2"):
        check_studied(found["studied_one"], found[case], shards=2)


def check_studied(one: dict, many: dict, shards: int) -> None:
    assert one["errors"] == [] and one["fork_shards"] == [0] and many["fork_shards"] == list(range(shards))
    assert many["free"][0] == many["free"][1]
    for name in ("errors", "tokens", "forked", "prompt_tops"):
        assert many[name] == one[name], name
    for name in ("prompts", "scores"):
        for ours, theirs in zip(many[name], one[name], strict=True):
            np.testing.assert_allclose(ours, theirs, atol=MOST_LOGPROB_DIFFERENCE)
    np.testing.assert_allclose(many["beams"], one["beams"], atol=MOST_LOGPROB_DIFFERENCE)
    assert all(len(samples) == 2 for samples in one["forked"])
    assert all(len({tuple(samples[i][:3]) for i in (0, 1)}) == 1 for samples in one["forked"])


@pytest.mark.slow
def test_no_shard_stands_idle_while_lengths_are_mixed():
    found = runs("levelled_data4")["levelled_data4"]
    assert found["free"][0] == found["free"][1]
    assert len(found["idle_share"]) == 4 and max(found["idle_share"].values()) <= 0.05


@pytest.mark.slow
@pytest.mark.skipif(not cpu.available(), reason="the C++ kernels were not built")
def test_the_bits_of_a_request_are_the_same_on_any_shard_of_any_number():
    found = runs("invariant_one", "invariant_data2", "invariant_data4")
    one = found["invariant_one"]
    assert [found[name]["shards"] for name in found] == [1, 2, 4]
    for case in ("invariant_data2", "invariant_data4"):
        assert found[case]["tokens"] == one["tokens"] and found[case]["bits"] == one["bits"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["blocks_model4", "blocks_data2_model2"])
def test_in_blocks_the_bits_of_a_request_on_a_mesh_are_those_of_the_request_alone(case):
    found = runs(case)[case]
    assert found["differing"] == 0 and found["compared"] == 12


@pytest.mark.slow
def test_bfloat16_weights_with_a_tied_head():
    found = runs("tied_one", "tied_model2")
    one, many = found["tied_one"], found["tied_model2"]
    same = sum(a == b for a, b in zip(one["tokens"], many["tokens"], strict=True))
    assert same > len(one["tokens"]) // 2 and many["errors"] == []


# What is decided without devices


def abstract_layout(**sizes) -> Layout:
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
    return Layout.of(mesh, tiny_model(num_key_value_heads=2, num_attention_heads=6, hidden_size=48).config)


def test_heads_are_copied_and_axes_filled_up_so_that_they_can_be_spread():
    layout = abstract_layout(data=1, model=4)
    assert (layout.kv_copies, layout.kv_heads, layout.num_ranks) == (2, 1, 1)
    assert (layout.vocab.part_size, layout.vocab.padded_size) == (16, 64)
    names = (LAYERS, KV_HEADS, Q_HEADS_PER_GROUP, HEAD_SIZE)
    q = hax.named(np.arange(2 * 2 * 3 * 8).reshape(2, 2, 3, 8), names)
    fitted = layout.fitted(q).array
    assert fitted.shape == (2, 4, 2, 8)
    assert (fitted[:, 0] == q.array[:, 0, :2]).all() and (fitted[:, 1, 0] == q.array[:, 0, 2]).all()
    assert (fitted[:, 1, 1] == 0).all() and (fitted[:, 3, 0] == q.array[:, 1, 2]).all()
    k = hax.named(np.arange(2 * 2 * 8).reshape(2, 2, 8), (LAYERS, KV_HEADS, HEAD_SIZE))
    assert (layout.fitted(k).array == np.repeat(k.array, 2, axis=1)).all()
    table = layout.fitted(hax.named(np.ones((61, 4)), (VOCAB, EMBED))).array
    assert table.shape == (64, 4) and table[:61].all() and not table[61:].any()
    assert layout.spec(layout.fitted(q).axes) == jax.sharding.PartitionSpec(None, MODEL, None, None)


def test_a_mesh_that_is_not_there_or_has_no_meaning_is_refused():
    with pytest.raises(ValueError, match=r"data=3 times model=2 is 6 devices, and there are 1 \(cpu\)"):
        make_mesh(MeshConfig(data=3, model=2))
    with pytest.raises(ValueError, match="mesh.model=3: expected one of 1, 2, 4, 8 or 16"):
        MeshConfig(model=3)
    with pytest.raises(ValueError, match="mesh.expert=2: the model has no experts"):
        abstract_layout(data=2, expert=2)
    with pytest.raises(ValueError, match="mesh.expert=3 does not divide the model's 8 experts"):
        Layout.of(jax.sharding.AbstractMesh((3,), ("expert",)), tiny_model(**EXPERTS).config)
    assert [make_mesh(config).shape for config in (MeshConfig(), None)] == [{DATA: 1, MODEL: 1}] * 2


def test_a_mesh_of_one_device_runs_on_that_device():
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), (DATA, MODEL))
    engine = InferenceEngine(tiny_model(), mesh=mesh)
    assert engine.describe()["mesh"] == {} and engine.backend.layout.mesh is mesh


def test_arrays_that_are_on_the_mesh_stay_and_others_are_put_there():
    layout = Layout.of(None, tiny_model().config)
    there, host = hax.named(jax.device_put(np.ones(3)), "embed"), np.ones(3)
    placed, moved = layout.place((there, host))
    assert placed.array is there.array and moved.sharding == layout.sharding(())


def test_rows_of_several_ranks_come_in_the_order_in_which_they_are_wanted():
    shards, wanted = [1, 0, 1, 1, 0, 1, 1], [10, 3, 11, 12, 4, 13, 14]
    reads = Gather(shards, 3, size=2)
    calls = reads.arguments(wanted, fill=99)
    assert [call.tolist() for call in calls] == [
        [[3, 4], [10, 11], [99, 99]],
        [[99, 99], [12, 13], [99, 99]],
        [[99, 99], [14, 99], [99, 99]],
    ]
    assert reads.rows(calls).tolist() == wanted
    alone = Gather([0] * 5, 1, size=4)
    assert [call.tolist() for call in alone.arguments(range(5), fill=-1)] == [[0, 1, 2, 3], [4, -1, -1, -1]]
    assert alone.rows([np.eye(4), np.ones((4, 4))]).shape == (5, 4)
    assert Gather([], 2, size=4).arguments([], fill=0) == []


def test_idle_shares_are_of_the_longest_rank_of_each_round():
    steps = RankSteps(2)
    assert steps.on_round([10, 6]) == 10 and steps.on_round([14, 16]) == 10
    assert steps.idle_shares == {"0": 6 / 20, "1": 4 / 20}
    steps.on_reset()
    assert steps.on_round([2, 2]) == 2


@dataclasses.dataclass(frozen=True)
class Chip:
    coords: tuple[int, int, int]


def test_four_chips_of_a_group_are_in_the_order_of_a_ring():
    square = [Chip((x, y, 0)) for x in range(2) for y in range(2)]  # as a v4's or v5p's come
    found = in_rings(np.asarray([square, [Chip((x + 2, y, 0)) for x in range(2) for y in range(2)]]))
    assert [chip.coords[:2] for chip in found[0]] == [(0, 0), (0, 1), (1, 1), (1, 0)]
    assert [chip.coords[:2] for chip in found[1]] == [(2, 0), (2, 1), (3, 1), (3, 0)]
    assert (in_rings(found) == found).all()
    others = np.asarray([[object() for _ in range(4)]])
    assert in_rings(others) is others
