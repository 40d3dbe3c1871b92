"""One engine over the devices of two processes: the tokens of one device, and the same decisions in both."""

import json

from tests import mesh_runs
from tests.engine.test_mesh import check_two_shards_of_two_devices
from tests.pairs import Processes, free_port


def test_two_processes_of_two_devices_give_the_tokens_of_one_device_and_decide_alike(tmp_path):
    port = str(free_port())
    with Processes(tmp_path, "tests.host_runs", [["0", "2", port], ["1", "2", port]]) as processes:
        one = mesh_runs.run(None, 16, {})
        statuses = processes.wait(240)
        assert statuses == [0, 0], "\n--\n".join(processes.said)
        first, second = (json.loads(path.read_text().splitlines()[-1]) for path in processes.outputs)
    assert first == second  # to the bit, whatever the clocks
    check_two_shards_of_two_devices(one, first)
    assert first["max_pages"] == 60 and first["free"] == [120, 120] and first["free_at_the_end"] == 120
    scores, memory = first["refused"]
    assert "prompt_logprobs: not on a mesh over several hosts" in scores and "other hosts have some of them" in memory
    reasons, tokens = first["disturbed_reasons"], first["disturbed"]
    assert reasons[2] == reasons[4] == "abort" and tokens[4] == [] and len(tokens[2]) < 50
    assert [reasons[i] for i in (0, 1, 3, 6, 7)] == ["length"] * 5
    cancelled = next(round_id for round_id, i in first["known"] if i == 2)
    assert 3 <= cancelled <= 5  # process 1 asked before round 3
