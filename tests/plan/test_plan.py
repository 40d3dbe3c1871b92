"""A plan says of a job what the job's own engine says, and of one that does not fit the smallest change."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from rich.console import Console

from levanter_infer.batch.config import BatchRunConfig
from levanter_infer.config import ModelSource, RunConfig, load_config
from levanter_infer.engine import tile_search
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from levanter_infer.kernels.tpu.sizes import Tile
from levanter_infer.kernels.tpu.tiling import Tiles, TileShape, choose, propose
from levanter_infer.models.registry import family_for
from levanter_infer.plan import compiled, plan
from levanter_infer.plan.__main__ import main
from levanter_infer.plan.compiled import CompiledProgram, compile_programs
from levanter_infer.plan.figures import figures_of
from levanter_infer.plan.report import show
from levanter_infer.plan.roofline import Workload
from levanter_infer.plan.search import misfit, smallest_changes
from levanter_infer.plan.spec import EngineSpec, spec_of
from levanter_infer.plan.targets import parse_target
from tests.golden_cases import load_case
from tests.tiny_models import LLAMA, tiny_model

ROOT = Path(__file__).resolve().parents[2]
SHAPES = ROOT / "configs" / "shapes"
WORKLOAD = Workload(100, 100)
PLANNED = [
    ("tiny.yaml", "cpu", None),
    ("batch-tiny.yaml", "cpu", None),
    ("llama-1b-gpu.yaml", "h100", "llama-3.2-1b.json"),
    ("llama-8b-v5e-16.yaml", "v5e-16", "llama-3.1-8b.json"),
    ("llama-70b-v5p-16.yaml", "v5p-16", "llama-3.1-70b.json"),
    ("deepseek-v3-v5p-64.yaml", "v5p-64", "deepseek-v3.json"),
]


def command(*arguments: str) -> int:
    return main([*arguments, "--plan.timeout_s", "300"])


def shape(name: str) -> dict:
    return json.loads((SHAPES / f"{name}.json").read_text())


def job_8b(target: str, mesh: dict, **engine) -> EngineSpec:
    engine = {"max_seqs": 64, "max_seq_len": 8192, "page_size": 64} | engine
    return EngineSpec(target, shape("llama-3.1-8b"), "bfloat16", engine, mesh)


def test_a_directory_that_is_not_there_is_named_before_anything_is_computed(tmp_path, capsys):
    config = ["--config", f"{ROOT}/configs/llama-8b-v5e-16.yaml", "--target", "v5e-16"]
    assert (
        command(*config, "--json", str(tmp_path / "none" / "plan.json")) == 2
        and "its directory does not exist" in capsys.readouterr().err
    )


@pytest.mark.parametrize("config, target, model", PLANNED, ids=lambda value: value)
def test_each_configuration_of_a_machine_fits_it(config, target, model, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(ROOT)
    written = tmp_path / "plan.json"
    shape_given = ["--shape", str(SHAPES / model)] if model else []
    arguments = ["--config", f"configs/{config}", "--target", target, *shape_given, "--no-compile"]
    assert command(*arguments, "--json", str(written)) == 0
    said = capsys.readouterr().out
    assert "fits" in said and "not compiled" in said and "what binds" in said
    found = json.loads(written.read_text())
    assert found["fits"] and found["programs"] == [] and found["speed"]["tokens_per_s"] > 0
    assert found["memory"]["free_bytes"] > 0
    assert found["figures"]["num_pages"] >= found["figures"]["seq_pages"]
    if target == "v5e-16":  # weights are sharded over 8 chips, but for the norms
        arch = family_for(shape("llama-3.1-8b")).config_from_hf(shape("llama-3.1-8b"))
        norms = (2 * arch.num_layers + 1) * arch.hidden_size
        assert found["figures"]["weights_bytes"] == 2 * ((arch.num_parameters - norms) // 8 + norms)
        assert found["figures"]["page_bytes"] == 2 * 2 * arch.num_layers * 64 * arch.head_dim


def test_every_configuration_of_this_repository_is_planned():
    planned = {name for name, _, _ in PLANNED}
    assert planned | {"score.yaml"} == {path.name for path in (ROOT / "configs").glob("*.yaml")}


def test_figures_are_those_of_the_engine():
    config = {"max_seqs": 4, "max_seq_len": 64, "page_size": 8, "max_pages": 30, "max_step_tokens": 16}
    engine = InferenceEngine(tiny_model(), config=EngineConfig(**config))
    found = figures_of(EngineSpec("cpu", LLAMA, "float32", config, {}, num_eos=0))
    assert found.num_pages == engine.shapes.num_pages and found.buckets == engine.shapes.buckets
    assert found.weights_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(engine.model))
    assert found.pool_bytes == engine.state.cache.pools[0].pages.array.nbytes
    assert found.tables_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(engine.state.decode))
    assert (found.attention, found.matmul) == (engine.backend.attention, engine.backend.matmul)


def test_what_sampling_asks_for_from_the_start_is_planned(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    config = RunConfig(
        model=ModelSource(str(tmp_path), "float32"),
        prompts=["a"],
        engine={"max_seqs": 3, "max_seq_len": 64, "max_pages": 9},
    )
    for sampling, name, expected in (
        (SamplingParams(regex="a+"), "constraints", lambda shapes: shapes.constraints is not None),
        (SamplingParams(num_beams=3), "max_beams", lambda shapes: shapes.max_beams == 3),
        (SamplingParams(prompt_logprobs=1), "scoring", lambda shapes: shapes.scoring is not None),
    ):
        plain, asked = (
            spec_of(dataclasses.replace(config, sampling=each), "cpu", None).blueprint().shapes
            for each in (SamplingParams(), sampling)
        )
        assert expected(asked) and dataclasses.replace(asked, **{name: getattr(plain, name)}) == plain


def test_the_plan_of_steps_in_blocks_says_how_often_they_read_the_weights(capsys):
    engine = {"max_seqs": 16, "max_seq_len": 2048, "numerics": "batch_invariant"}
    spec = EngineSpec("v5e-4", shape("llama-3.1-8b"), "bfloat16", engine, {"model": 4})
    assert figures_of(spec).block_tokens == 256
    planned = plan.make_plan(spec, Workload(512, 256), compiles=False)
    default = dataclasses.replace(spec, engine=engine | {"numerics": "default"})
    ordinary = plan.make_plan(default, Workload(512, 256), compiles=False).speed
    assert planned.speed is not None and ordinary is not None
    assert planned.speed.decode.weights_s == ordinary.decode.weights_s  # a block
    assert planned.speed.decode.compute_s > 10 * ordinary.decode.compute_s  # of 256 tokens in place of 16
    assert planned.speed.tokens_per_s < ordinary.tokens_per_s
    show(planned, Console(width=200))
    assert "all weights but the embeddings once for each block of 256 tokens" in capsys.readouterr().out


def test_a_gemma_3_at_32k_tokens_holds_its_full_layers_and_a_window_of_the_others():
    """The real shape, on a chip: 1 layer in 6 sees everything, the others 1024 tokens."""
    spec = EngineSpec("v5p-8", GEMMA_3_27B, "bfloat16", {"max_seqs": 16, "max_seq_len": 32768}, {"model": 4})
    whole = dataclasses.replace(spec, engine=spec.engine | {"window_cache": False})
    found, all_full = figures_of(spec), figures_of(whole)
    (window,) = found.windows
    assert all_full.windows == () and all_full.num_pages == found.num_pages == 16 * 2048
    assert found.page_bytes + window.page_bytes == all_full.page_bytes
    assert found.pool_bytes == found.num_pages * found.page_bytes + window.num_pages * window.page_bytes
    full_share = found.page_bytes / all_full.page_bytes
    assert full_share == 10 / 62
    # One sequence: its pages of the full layers, and of the others those that a window and the page it grows into touch
    held = 2048 * found.page_bytes + (1024 // 16 + 2) * window.page_bytes
    assert held <= (full_share + (1024 + 2 * 16) / 32768) * 2048 * all_full.page_bytes
    # The pools: the windows of all sequences, as many again for cached prefixes, and the tokens of a step
    windows = 2 * (17 * (1024 + 3 * 16) + 256) / (16 * 32768)
    assert found.pool_bytes <= (full_share + windows) * all_full.pool_bytes


def test_states_of_fixed_size_and_their_snapshots_are_counted():
    """With none, few and the default number of them."""
    raw, engine = load_case("qwen3_next").config, {"max_seqs": 4, "max_seq_len": 64, "max_pages": 40}
    found, few, none = (
        figures_of(EngineSpec("cpu", raw, "float32", engine | more, {}))
        for more in ({}, {"state_snapshots": 3}, {"prefix_cache": False})
    )
    assert [each.states.num_snapshots for each in (found, few, none)] == [8, 3, 0]
    assert found.states.num_slots == 8 and found.states.state_bytes == none.states.state_bytes
    for each in (found, few):
        assert each.pool_bytes - none.pool_bytes == each.states.num_snapshots * each.states.state_bytes
    assert none.pool_bytes == 40 * none.page_bytes + 8 * none.states.state_bytes


def test_snapshots_take_a_quarter_of_the_memory_for_pools():
    """Without `max_pages`: what they take is not there for pages."""
    raw = load_case("qwen3_next").config
    engine = {"max_seqs": 64, "max_seq_len": 32768, "page_size": 64}
    spec = EngineSpec("h100", raw | {"num_hidden_layers": 48, "linear_num_value_heads": 64, "linear_num_key_heads": 32,
                      "linear_key_head_dim": 128, "linear_value_head_dim": 128}, "bfloat16", engine, {})  # fmt: skip
    found = figures_of(spec)
    none = figures_of(dataclasses.replace(spec, engine=engine | {"prefix_cache": False}))
    kept = found.states.num_snapshots * found.states.state_bytes
    assert 0 < found.states.num_snapshots <= 128 and kept <= found.memory_bytes / 4
    assert none.num_pages * none.page_bytes - found.num_pages * found.page_bytes >= 0
    assert found.known_bytes <= found.memory_bytes


GEMMA_3_27B = {
    "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "vocab_size": 262208, "hidden_size": 5376,
    "intermediate_size": 21504, "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16,
    "head_dim": 128, "sliding_window": 1024, "sliding_window_pattern": 6, "query_pre_attn_scalar": 168,
    "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
}  # fmt: skip


def test_heads_that_a_tpu_fills_up_to_its_lanes_count_as_they_lie():
    raw = shape("llama-3.2-1b")  # 8 heads of 64, which share 128 lanes in pairs
    jobs = [EngineSpec("v5e-16", raw, "bfloat16", {"max_seq_len": 1024}, {"model": model}) for model in (1, 8)]
    whole, part = (figures_of(spec).page_bytes for spec in jobs)
    assert whole == 16 * 2 * 8 * 64 * 16 * 2 and part == whole // 4  # one head alone has 128 lanes of its own


@pytest.mark.parametrize(
    "spec, why, key",
    [
        (job_8b("v6e-4", {"data": 4}, max_pages=3000), "a device needs 38.40 GiB and has 31.25", "engine.max_pages"),
        (job_8b("v5e-4", {"data": 4}), "takes 128 pages, and there are 84", "engine.max_seq_len"),
        (
            job_8b("v5e-1", {}, max_seqs=128, max_seq_len=4096),
            "holds 84 pages.*128 sequences need one each",
            "engine.max_seqs",
        ),
    ],
)
def test_the_smallest_change_of_a_number_is_just_enough(spec, why, key):
    reason = misfit(spec)
    assert reason is not None
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(reason)
    change = next(each for each in smallest_changes(spec) if each.key == key)
    assert change.before > change.after and misfit(change.spec) is None
    name = key.removeprefix("engine.")
    step = 64 if name == "max_seq_len" else 1
    more = dataclasses.replace(change.spec, engine=change.spec.engine | {name: change.after + step})
    assert misfit(more) is not None


def test_weights_that_are_too_large_want_more_chips():
    spec = job_8b("v5e-4", {"data": 4}, max_seq_len=8192, max_pages=4096)
    keys = [change.key for change in smallest_changes(spec)]
    assert keys[0] == "mesh" and str(smallest_changes(spec)[0]).endswith("{'data': 1, 'model': 4}")
    large = EngineSpec("v5e-4", shape("llama-3.1-70b"), "bfloat16", {"max_seq_len": 4096}, {"model": 4})
    (change,) = smallest_changes(large)
    assert change.key == "target" and change.spec.target == "v5e-16" and change.spec.mesh["model"] == 16


def test_a_mesh_larger_than_the_target_does_not_fit_it():
    spec = job_8b("v5e-4", {"model": 8})
    assert misfit(spec) == "mesh: data=1 times model=8 is 8 devices, and v5e-4 has 4"
    found = [str(change) for change in smallest_changes(spec)]
    assert found == ["mesh.model: 8 -> 4", "target: v5e-4 -> v5e-8"]


def test_an_axis_of_a_mesh_is_shortened_to_the_chips_that_are_there():
    spec = job_8b("v5e-16", {"model": 4, "data": 100})
    assert str(smallest_changes(spec)[0]) == "mesh.data: 100 -> 4"
    spec = job_8b("v5e-16", {"model": 4, "expert": 2})
    assert "the model has no experts" in str(misfit(spec))
    assert [str(change) for change in smallest_changes(spec)] == ["mesh.expert: 2 -> 1"]


def test_what_the_compiler_needs_beyond_the_shapes_counts():
    spec = job_8b("v6e-4", {"data": 4}, max_pages=1700)
    assert misfit(spec) is None

    def refuse(spec: EngineSpec, **_) -> list[CompiledProgram]:
        pages = spec.engine["max_pages"]
        arguments = figures_of(spec).known_bytes - figures_of(spec).upload_bytes // 2
        used = (arguments + (4 << 30)) / 2**30
        if used < 31.25:
            return [CompiledProgram("round", argument_bytes=arguments, workspace_bytes=4 << 30)]
        return [CompiledProgram("round", error=f"RESOURCE_EXHAUSTED: Used {used:.4f}G of 31.25G hbm. Exceeded {pages}")]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "compile_programs", refuse)
        found = plan.make_plan(spec, WORKLOAD, compiles=True)
    assert found.why_not is not None and "MiB of hbm" in found.why_not
    best = found.changes[0]
    assert found.checked and best.key == "engine.max_pages"
    assert 4 << 30 <= 31.25 * 2**30 - figures_of(best.spec).known_bytes < (4 << 30) + 2**24


def test_a_kernel_that_is_too_large_is_tried_with_other_pages():
    spec = job_8b("v6e-4", {"data": 4}, page_size=256)

    def refuse(spec: EngineSpec, **_) -> list[CompiledProgram]:
        error = None if spec.engine["page_size"] <= 64 else "Used 18.32M of 16.00M vmem. Exceeded"
        return [CompiledProgram("round", error=error)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "compile_programs", refuse)
        patch.setattr(tile_search, "find_tiles", lambda shape, **_: propose(dataclasses.replace(shape, page_size=64)))
        found = plan.make_plan(spec, WORKLOAD, compiles=True)
    assert "needs 18.3 MiB of vmem and has 16.0 MiB" in (found.why_not or "")
    assert [str(change) for change in found.changes] == ["engine.page_size: 256 -> 64"] and found.checked


def test_a_kernel_that_is_too_large_gets_tiles_that_the_compiler_accepts(monkeypatch):
    spec, asked = job_8b("v5p-8", {"model": 4}), []
    smaller = Tiles(Tile(pages=2, slots=2, parts=2), Tile(pages=1, slots=2, parts=2, queries=8))

    def refuse(spec: EngineSpec, **_) -> list[CompiledProgram]:
        tiles = figures_of(spec).tiles
        error = None if tiles["decode"]["pages"] == 2 else "Used 18.32M of 16.00M vmem. Exceeded"
        return [CompiledProgram("round", error=error)]

    def search(shape: TileShape, **sizes) -> Tiles:
        asked.append((shape, sizes))
        return smaller

    monkeypatch.setattr(plan, "compile_programs", refuse)
    monkeypatch.setattr(tile_search, "find_tiles", search)
    found = plan.make_plan(spec, WORKLOAD, compiles=True)
    assert "needs 18.3 MiB of vmem" in (found.why_not or "") and found.checked
    assert asked == [(TileShape("v5p", 2, 128, 4, 64), {"max_tokens": 256, "q_dtype": "bfloat16"})]
    (change,) = found.changes
    assert (change.key, change.before, change.after) == (
        "engine.tiles",
        dataclasses.asdict(choose(asked[0][0])),
        dataclasses.asdict(smaller),
    )
    assert change.spec.engine_config.tiles == smaller
    # What a user forces is used, and refused where no kernel can have it.
    bad = dataclasses.asdict(dataclasses.replace(smaller, prefill=dataclasses.replace(smaller.prefill, parts=3)))
    with pytest.raises(ValueError, match="engine.tiles.prefill.parts=3: expected a divisor of the 2 groups"):
        figures_of(dataclasses.replace(spec, engine=spec.engine | {"tiles": bad}))


@pytest.mark.slow
def test_programs_are_compiled_with_what_they_send(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(ROOT)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"torch_dtype": "float32"}))
    (tmp_path / "run.yaml").write_text(
        f"model: {tmp_path}\nprompts: [a]\nmesh: {{model: 2}}\n"
        "engine: {max_seqs: 4, max_seq_len: 64, page_size: 8, max_pages: 30, max_step_tokens: 4, prefix_cache: false}\n"
    )
    assert command("--config", str(tmp_path / "run.yaml"), "--target", "cpux2", "--json", "-") == 0
    found = json.loads(capsys.readouterr().out)
    assert [program["name"] for program in found["programs"]] == ["round", "init", "reset", "zero_cache"]
    one_round = found["programs"][0]
    assert one_round["error"] is None and one_round["workspace_bytes"] > 0 and one_round["compile_s"] > 0
    layers = [each for each in one_round["collectives"] if each["kind"] == "f32[4,32]" and each["depth"] == 3]
    assert [(each["operation"], each["parts"], each["count"]) for each in layers] == [("all-reduce", 2, 2)]
    assert found["speed"]["decode"]["collectives_s"] == 0  # in the memory of one machine


GRID = """
from levanter_infer.engine.mesh import MeshConfig, make_mesh
from levanter_infer.plan.compiler import devices_of
from levanter_infer.plan.targets import parse_target

devices = devices_of(parse_target("v5e-16"))
print([device.coords[:2] for device in make_mesh(MeshConfig(data=2, model=8), devices).devices[0]])
try:
    make_mesh(MeshConfig(data=3, model=4), devices)
except ValueError as error:
    print(error)
"""


@pytest.mark.tpu_compile
def test_a_mesh_is_laid_over_the_chips_of_a_torus():
    pytest.importorskip("libtpu", reason="the TPU compiler comes with the extra `test`")
    environment = compiled.environment_for(parse_target("v5e-16"))
    command = [sys.executable, "-W", "ignore", "-c", GRID]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    row, refusal = done.stdout.splitlines()
    assert row == "[[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1], [3, 0], [3, 1]]"  # two by four
    assert "is 12 of 16 chips, which form no grid" in refusal


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_the_cores_of_a_v4_are_one_device():
    pytest.importorskip("libtpu", reason="the TPU compiler comes with the extra `test`")
    code = GRID.split("print")[0].replace("v5e-16", "v4-8") + "print([device.coords for device in devices])"
    command = [sys.executable, "-W", "ignore", "-c", code]
    environment = compiled.environment_for(parse_target("v4-8"))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[0] == "[[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0]]", done.stderr[-500:]


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_programs_are_compiled_for_a_tpu():
    pytest.importorskip("libtpu", reason="the TPU compiler comes with the extra `test`")
    raw = shape("llama-3.2-1b") | {"num_hidden_layers": 2, "vocab_size": 1000}
    engine = {"max_seqs": 8, "max_seq_len": 512, "max_pages": 64, "max_step_tokens": 8}
    programs = compile_programs(EngineSpec("v5e-4", raw, "bfloat16", engine, {"model": 4}), timeout_s=900)
    assert [program.error for program in programs] == [None] * 4
    assert {each.parts for each in programs[0].collectives} == {4}
    assert programs[0].no_budget is None
    assert all(budget.cycles["matmuls"] > 0 and budget.kernels for budget in programs[0].budgets)


def test_without_a_compiler_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(compiled, "find_spec", lambda name: None)
    assert command("--config", "configs/tiny.yaml", "--target", "v5e-1") == 2
    assert "pip install libtpu" in (said := capsys.readouterr().err) and "--no-compile" in said


@pytest.mark.parametrize(
    "script, timeout_s, why",
    [("echo no more >&2; kill -ABRT $$", 60, "the compiler ended its process: no more"), ("exec sleep 9", 0.1, "0 s")],
)
def test_a_compiler_that_dies_or_takes_too_long_has_refused(script, timeout_s, why, monkeypatch, tmp_path):
    monkeypatch.setattr(compiled.sys, "executable", executable(tmp_path, script))
    (program,) = compile_programs(EngineSpec("cpu", LLAMA, "float32", {}, {}), timeout_s=timeout_s)
    assert program.error is not None and why in program.error


@pytest.mark.parametrize("status, error", [(3, ValueError), (2, RuntimeError)])
def test_what_is_wrong_with_the_job_is_no_refusal_of_the_compiler(status, error, monkeypatch, tmp_path):
    monkeypatch.setattr(compiled.sys, "executable", executable(tmp_path, f"echo wrong >&2; exit {status}"))
    with pytest.raises(error, match="wrong"):
        compile_programs(EngineSpec("cpu", LLAMA, "float32", {}, {}), timeout_s=60)


def executable(directory: Path, script: str) -> str:
    path = directory / "python"
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--target", "cpu"], "no model"),
        (["--model", "models/tiny"], "lacks plan|plan lacks target"),
        (["--model", "no/such-model", "--target", "cpu"], "not on this machine.*--shape"),
        (["--model", "models/tiny", "--target", "cpu", "--shape", "nowhere.json"], "cannot read nowhere.json"),
        (["--model", "models/tiny", "--target", "cpu", "--prompt-tokens", "0"], "expected more than 0"),
        (["--model", "models/tiny", "--target", "cpu", "--engine.max_seq", "3"], "engine.max_seq.*max_seq"),
        (["--model", "models/tiny", "--target", "cpu", "--model.dtype", "float8"], "bfloat16, float16, float32"),
        (["--model", "models/tiny", "--target", "h100x0"], "target 'h100x0' is not known"),
    ],
)
def test_mistakes_are_named(arguments, message, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert command(*arguments, "--no-compile") == 2
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(capsys.readouterr().err)


def test_a_job_that_does_not_fit_is_an_exit_status(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    shape_given = ["--model", "x", "--shape", str(SHAPES / "llama-3.1-8b.json")]
    assert command(*shape_given, "--target", "v5e-4", "--no-compile", "--engine.max_seq_len", "8192") == 1
    said = capsys.readouterr().out
    assert "does not fit" in said and "smallest change  engine.max_seq_len: 8192 -> " in said


BATCHES = [name for name, _, _ in PLANNED if "levanter_infer.batch" in (ROOT / "configs" / name).read_text()]


@pytest.mark.parametrize("name", BATCHES)
def test_what_calls_itself_a_batch_job_is_one(name):
    assert load_config(ROOT / "configs" / name, kind=BatchRunConfig).prompts_file
