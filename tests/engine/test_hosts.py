"""One engine over the devices of two processes: the tokens of one device, and the same decisions in both."""

import json

import pytest

from levanter_infer.kernels.cpu import bindings as cpu
from tests import mesh_runs
from tests.engine.test_mesh import (
    LAYOUTS,
    check_loaded,
    check_same,
    check_slept,
    check_studied,
    check_swapped,
    check_two_shards_of_two_devices,
)
from tests.pairs import Processes, free_port


def runs(tmp_path, devices: int, *cases: str, meanwhile=lambda: None) -> list[dict]:
    """The findings of two processes of `devices` in `cases` of `host_runs`, and the result of `meanwhile`."""
    own = [str(free_port()), str(devices), *cases]
    with Processes(tmp_path, "tests.host_runs", [["0", "2", *own], ["1", "2", *own]]) as processes:
        here = meanwhile()
        statuses = processes.wait(900)
        assert statuses == [0, 0], "\n--\n".join(processes.said)
        return [*(json.loads(path.read_text().splitlines()[-1]) for path in processes.outputs), here]


@pytest.mark.slow
def test_two_processes_of_two_devices_give_the_tokens_of_one_device_and_decide_alike(tmp_path):
    cases = ["disturbed", "loaded_data2_model2"]
    first, second, one = runs(tmp_path, 2, *cases, meanwhile=lambda: mesh_runs.case("some_one"))
    assert first == second  # to the bit, whatever the clocks
    check_loaded(first["loaded_data2_model2"])
    first = first["disturbed"]
    check_two_shards_of_two_devices(one, first)
    assert first["max_pages"] == 60 and first["free"] == [120, 120] and first["free_at_the_end"] == 120
    assert "other processes hold some of them" in first["refused"]
    reasons, tokens = first["disturbed_reasons"], first["disturbed"]
    assert reasons[2] == reasons[4] == "abort" and tokens[4] == [] and len(tokens[2]) < 50
    assert [reasons[i] for i in (0, 1, 3, 6, 7)] == ["length"] * 5
    cancelled = next(round_id for round_id, i in first["known"] if i == 2)
    assert 3 <= cancelled <= 5  # process 1 asked before round 3


@pytest.mark.slow
@pytest.mark.parametrize("mesh", LAYOUTS)
def test_two_hundred_requests_get_the_tokens_of_one_device(tmp_path, mesh):
    devices, case = mesh_runs.mesh_of(mesh).num_devices // 2, f"many_{mesh}"
    first, second, one = runs(tmp_path, devices, case, meanwhile=lambda: mesh_runs.case("many_one"))
    assert first == second
    check_same(one, first[case])


@pytest.mark.slow
def test_weights_that_change_give_each_token_its_version(tmp_path):
    first, second, _ = runs(tmp_path, 2, "swapped_data2_model2")
    assert first == second
    check_swapped(first["swapped_data2_model2"])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["model2", "data2_model2"])
def test_an_engine_of_two_processes_sleeps_and_takes_weights(tmp_path, mesh):
    case = f"slept_{mesh}"
    first, second, _ = runs(tmp_path, mesh_runs.mesh_of(mesh).num_devices // 2, case)
    assert first == second
    check_slept(first[case])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data2", "model2", "data2_model2"])
def test_prompts_are_scored_searches_made_and_samples_forked_on_every_shard(tmp_path, mesh):
    sizes, case = mesh_runs.mesh_of(mesh), f"studied_{mesh}"
    first, second, one = runs(tmp_path, sizes.num_devices // 2, case, meanwhile=lambda: mesh_runs.case("studied_one"))
    assert first == second
    check_studied(one, first[case], shards=sizes.data)


@pytest.mark.slow
@pytest.mark.skipif(not cpu.available(), reason="the C++ kernels were not built")
def test_the_bits_of_a_request_are_the_same_on_any_shard_of_any_process(tmp_path):
    cases = ["invariant_data4", "live_data2"]
    for case, shards in zip(cases, (4, 2), strict=True):
        first, second, one = runs(tmp_path, shards // 2, case, meanwhile=lambda: mesh_runs.case("invariant_one"))
        assert first == second
        many = first[case]
        assert many["shards"] == shards and many["tokens"] == one["tokens"] and many["bits"] == one["bits"]
        assert all(many["given_up"])
    assert len(many["given_up"]) == 3


@pytest.mark.slow
def test_a_checkpoint_is_there_once_when_the_pool_is_made(tmp_path):
    first, second, one = runs(tmp_path, 1, "stored_data2", meanwhile=lambda: mesh_runs.case("stored_one"))
    assert first == second
    check_same(one, first["stored_data2"])
    for found in (one, first["stored_data2"]):
        (copies,) = found["copies"]
        assert 0.9 < copies < 1.2


@pytest.mark.slow
@pytest.mark.parametrize("call", ["resample", "swap"])
def test_processes_that_call_differently_end_with_an_error(tmp_path, call):
    own = [str(free_port()), "1", f"differing_{call}"]
    with Processes(tmp_path, "tests.host_runs", [["0", "2", *own], ["1", "2", *own]]) as processes:
        assert processes.wait(300) != [0, 0]
        assert "has been given other requests or calls than" in processes.said[1]


@pytest.mark.slow
def test_a_process_reads_no_expert_that_its_devices_have_not(tmp_path):
    case = "loadedexperts_expert4"
    found = [each[case] for each in runs(tmp_path, 2, case)[:2]]
    check_loaded(*found)
    assert [each["experts"] for each in found] == [[0, 1, 2, 3], [4, 5, 6, 7]]
