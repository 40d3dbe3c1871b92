"""`config.json` is read strictly: what changes the mathematics is honoured or refused by name."""

import functools

import pytest

from levanter_infer.checkpoints.quantized.config import without_quantization
from levanter_infer.layers.rotary import RopeConfig
from levanter_infer.models.registry import FAMILIES, family_for
from tests.golden_cases import case_names, load_case

LLAMA = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
QWEN2 = {**LLAMA, "model_type": "qwen2", "num_key_value_heads": 2}
LONG = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}


def parse(raw=LLAMA, **changes):
    config = {**raw, **changes}
    return family_for(config).config_from_hf(config)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"sliding_windw": 4}, r"'sliding_windw' \(value 4\).*nearest known key"),
        ({"num_experts": 8}, "'num_experts'"),
        ({"sliding_window": 4}, "'sliding_window'"),
        ({"qk_layernorm": True}, "'qk_layernorm'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.*expected None"),
        ({"pretraining_tp": 2}, "pretraining_tp=2, expected 1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5, expected 1"),
        ({"auto_map": {"AutoModel": "evil.Model"}}, "auto_map"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder=True"),
        ({"activation": "geglu"}, "activation='geglu', expected 'swiglu'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu', expected one of silu"),
        ({"vocab_size": None}, "vocab_size=None, expected a whole number from 1"),
        ({"vocab_size": "32"}, "vocab_size='32'"),
        ({"vocab_size": True}, "vocab_size=True"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000.*to 10000"),
        ({"num_attention_heads": 3}, "hidden_size=16, expected a multiple of num_attention_heads=3"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4, expected a multiple of num_key_value_heads=3"),
        ({"head_dim": 5}, "head_dim=5, expected an even number"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps=a number of hundreds of digits"),
        ({"rope_scaling": {"rope_type": ["linear"], "factor": 2.0}}, "rope_type is no name"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan, expected a finite number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes', expected true or false"),
        ({"attention_bias": None}, "attention_bias=None, expected true or false"),
        ({"model_type": "bert"}, r"model_type='bert', expected one of .*gemma, .* llama, .*mistral, "),
    ],
)
def test_config_refuses_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        parse(**changes)


@pytest.mark.parametrize(
    "scaling, message",
    [
        ({"rope_type": "mrope"}, "rope_type='mrope', expected one of default"),
        ({"factor": 2.0}, "no rope_type"),
        ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, "differ"),
        ({"rope_type": "linear"}, "'linear' lacks factor"),
        ({"rope_type": "linear", "factor": 0.5}, "factor=0.5, expected at least 1"),
        ({"rope_type": "linear", "factor": "2"}, "factor='2', expected a finite number"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fst": 1}, "beta_fst=1 is not known"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": 1}, "truncate=1, expected true or false"),
        (
            {"rope_type": "yarn", "factor": 2.0, "attn_factor": 0.88},
            "attn_factor=0.88, expected 1: HF ignores",
        ),
        ({"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}, "with rope type 'dynamic'"),
        ({"rope_type": "longrope", **LONG}, "needs factor"),
        ({"rope_type": "longrope", **LONG, "short_factor": [1.0]}, "1 entries, expected .* = 2 numbers"),
        (
            {"rope_type": "longrope", **LONG, "factor": 3.0, "original_max_position_embeddings": 1024},
            "factor=3.0 but .* is 2.0",
        ),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 64,
            },
            "high_freq_factor must exceed",
        ),
        ({"rope_type": "default", "rope_theta": 5.0}, "rope_theta=10000.0 but rope_scaling.rope_theta=5.0"),
        ([1], r"rope_scaling=\[1\], expected null or an object"),
    ],
)
def test_rope_refuses_by_name(scaling, message):
    with pytest.raises(ValueError, match=message):
        parse(rope_scaling=scaling, rope_theta=10000.0)


def test_rope_is_the_same_in_both_spellings():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    old = parse(rope_theta=5e5, rope_scaling=scaling)
    assert old.ropes == (RopeConfig(kind="yarn", theta=5e5, factor=4.0, original_len=32),)
    assert parse(rope_parameters={**scaling, "rope_theta": 5e5}) == old
    with pytest.raises(ValueError, match="contradict"):
        parse(rope_scaling=scaling, rope_parameters={"rope_type": "default"})


def test_longrope_original_length_stands_beside_or_inside():
    scaling = {"type": "longrope", **LONG}
    beside = parse(rope_scaling=scaling, original_max_position_embeddings=512)
    assert (beside.ropes[0].original_len, beside.ropes[0].factor) == (512, 4.0)
    assert parse(rope_scaling={**scaling, "original_max_position_embeddings": 512}) == beside
    with pytest.raises(ValueError, match="none with rope type 'default'"):
        parse(original_max_position_embeddings=512)


def test_absent_keys_take_the_defaults_of_hf():
    llama, qwen3 = parse(), parse({**QWEN2, "model_type": "qwen3"})
    assert (llama.num_kv_heads, llama.head_dim, llama.norm.eps) == (4, 4, 1e-6)
    assert (llama.max_position_embeddings, llama.ropes[0].theta, llama.tie_word_embeddings) == (2048, 10000.0, False)
    assert qwen3.head_dim == 128 and parse(head_dim=8).head_dim == 8 and parse(head_dim=None).head_dim == 4
    mistral = parse({**LLAMA, "model_type": "mistral", "num_key_value_heads": None})
    assert mistral.num_kv_heads == 4 and mistral.windows == (4096, 4096)


def test_mistral_window_is_in_all_layers_or_in_none():
    mistral = {**LLAMA, "model_type": "mistral", "num_key_value_heads": 2}
    assert parse(mistral, sliding_window=8).windows == (8, 8)
    assert parse(mistral, sliding_window=None).windows == (None, None)
    with pytest.raises(ValueError, match="attention_bias=True, expected False"):
        parse(mistral, attention_bias=True)


def test_qwen_windows_follow_the_four_keys():
    window = {"use_sliding_window": True, "sliding_window": 8}
    assert parse(QWEN2, sliding_window=8, max_window_layers=0).windows == (None, None)
    assert parse(QWEN2, **window, max_window_layers=1).windows == (None, 8)
    assert parse(QWEN2, **window, max_window_layers=2).windows == (None, None)
    kinds = ["sliding_attention", "full_attention"]
    assert parse(QWEN2, **window, max_window_layers=2, layer_types=kinds).windows == (8, None)
    with pytest.raises(ValueError, match="without use_sliding_window=true"):
        parse(QWEN2, sliding_window=8, layer_types=kinds)
    with pytest.raises(ValueError, match="one entry for each of num_hidden_layers=2"):
        parse(QWEN2, **window, layer_types=kinds[:1])
    with pytest.raises(ValueError, match="a list of full_attention and sliding_attention"):
        parse(QWEN2, **window, layer_types=["chunked_attention", "full_attention"])


def test_biases_and_norms_are_those_of_the_family():
    def kinds(config):
        (block,) = set(config.blocks)
        mixer = block.mixer
        return mixer.qkv_bias, mixer.out_bias, block.feed_forward.bias, mixer.qk_norm is not None

    assert kinds(parse()) == (False, False, False, False)
    assert kinds(parse(attention_bias=True, mlp_bias=True)) == (True, True, True, False)
    assert kinds(parse(QWEN2)) == (True, False, False, False)
    assert kinds(parse({**QWEN2, "model_type": "qwen3"}, attention_bias=True)) == (True, True, False, True)


def test_informational_keys_change_nothing():
    extras = {"torch_dtype": "bfloat16", "use_cache": False, "eos_token_id": [1, 2], "attention_dropout": 0.1}
    assert parse(**extras, _name_or_path="x", pretraining_tp=1, temperature=0.7, rope_scaling=None) == parse()


def test_config_survives_the_way_to_hf_and_back():
    configs = [load_case(name).config for name in case_names()]
    assert {config["model_type"] for config in configs} == set(FAMILIES)
    for raw in configs:
        family = family_for(raw)
        config = family.config_from_hf(raw)
        assert family.config_from_hf(family.config_to_hf(config)) == config


def test_keys_that_change_nothing_are_accepted():
    yarn = {"rope_type": "yarn", "factor": 2.0}
    plain = parse(rope_scaling=yarn)
    harmless = {"attn_factor": 1.0, "extrapolation_factor": 1.0}
    assert parse(rope_scaling={**yarn, **harmless}, max_sequence_length=2048, activation="swiglu") == plain


@pytest.mark.parametrize(
    "model_type, changes, message",
    [
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True, expected None or False"),
        ("gemma", {"hidden_act": "silu"}, "hidden_act='silu', expected one of gelu_pytorch_tanh, gelu"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping=-1.0, expected a finite number above 0"),
        ("gemma2", {"sliding_window": None}, "no 'sliding_attention' without a sliding_window"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0, expected None"),
        ("gemma3_text", {"rope_parameters": {"full_attention": {}, "ful": {}}}, "rope_parameters.ful={} is not known"),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {}, "rope_type": "linear"}},
            "rope_parameters.rope_type='linear' is not known",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {}}, "rope_theta": 5.0},
            "rope_theta=5.0, expected None",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"rope_type": "linear", "factor": 8.0}},
            "rope_parameters=.*linear.*, expected an entry for each of full_attention and sliding_attention",
        ),
        ("olmo3", {"layer_types": ["full_attention"]}, "one entry for each of num_hidden_layers=2"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear', expected default or longrope"),
        ("phi3", {"partial_rotary_factor": 0.75}, "partial_rotary_factor=0.75 of head_dim=4 is 3, odd"),
        ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5, expected 1 or less"),
        (
            "phi3",
            {"auto_map": {"AutoModel": "evil.Model"}},
            "auto_map=.*expected none, or classes of configuration_phi3",
        ),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers=.1., expected a list of at least 2"),
        ("smollm3", {"layer_types": ["sliding_attention"] * 2}, "without use_sliding_window=true"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier=0, expected a finite number above 0"),
        ("olmo2", {"clip_qkv": 8.0}, "'clip_qkv'"),
        ("exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern='LLLG', expected a whole number"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok=9, expected at most num_local_experts=8"),
        ("granitemoe", {"mlp_bias": True}, "'mlp_bias'"),
        ("olmoe", {"head_dim": 16}, "head_dim=16, expected hidden_size / num_attention_heads"),
        ("qwen2_moe", {"mlp_only_layers": [2]}, "mlp_only_layers=.2., expected .* less than num_hidden_layers=2"),
        ("ministral3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "expected llama_4_scaling_beta"),
        ("gpt_oss", {"experts_per_token": 2}, "experts_per_token=2, expected 4"),
        ("gpt_oss", {"quantization_config": {"quant_method": "awq"}}, "quantization_config=.*awq.*, expected None"),
        ("gpt_oss", {"sliding_window": None}, "no 'sliding_attention' without a sliding_window"),
        ("glm4_moe", {"n_group": 3}, "n_group=3, expected a divisor of the number of experts, 128"),
        ("glm4_moe", {"n_group": 64, "topk_group": 2}, "topk_group=2, expected enough groups of 2 experts"),
        ("glm4_moe", {"num_experts_per_tok": 200}, "num_experts_per_tok=200, expected at most .* 128"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func='softmax', expected 'sigmoid'"),
        ("minimax_m2", {"attn_type_list": [1, 0]}, "attn_type_list=.1, 0., expected None or .1, 1."),
        ("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size=8, expected 0"),
        ("minimax_m2", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config=.*fp8.*, expected None"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias=True, expected False"),
        ("ernie4_5_moe", {"moe_k": 65}, "moe_k=65, expected at most the number of experts, 64"),
        ("hunyuan_v1_moe", {"num_experts": [4, 8]}, "num_experts=.4, 8., expected one number for all layers"),
        ("hunyuan_v1_moe", {"moe_topk": [1]}, "moe_topk=.1., expected a whole number of at least 1, or one for each"),
        ("hunyuan_v1_dense", {"use_cla": True}, "use_cla=True, expected False"),
        ("llama4_text", {"layer_types": ["full_attention"]}, "one entry for each of num_hidden_layers=2"),
        ("llama4_text", {"moe_layers": [2]}, "moe_layers=.2., expected .* less than num_hidden_layers=2"),
        ("cohere2", {"use_parallel_block": False, "rms_norm_eps": None}, "use_parallel_block=False, expected True"),
    ],
)
def test_a_family_refuses_what_it_does_not_compute(model_type, changes, message):
    with pytest.raises(ValueError, match=message):
        parse(**{"model_type": model_type, "num_key_value_heads": 2, **changes})


def test_published_files_with_older_keys_are_read():
    own_code = {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
    phi3 = parse(model_type="phi3", auto_map=own_code, original_max_position_embeddings=4096, sliding_window=2047)
    assert phi3.ropes == (RopeConfig(),) and phi3.windows == (2047, 2047)
    su = parse(
        model_type="phi3", rope_scaling={"type": "su", **LONG}, original_max_position_embeddings=1024,
        max_position_embeddings=8192,
    )  # fmt: skip
    assert (su.ropes[0].kind, su.ropes[0].factor) == ("longrope", 8.0)
    gemma2 = parse(model_type="gemma2", head_dim=8, num_key_value_heads=2, cache_implementation="hybrid")
    assert gemma2.windows == (4096, None) and gemma2.logits_soft_cap == 30.0 and gemma2.tie_word_embeddings
    gemma3 = parse(model_type="gemma3_text", head_dim=8, num_key_value_heads=2, sliding_window_pattern=2)
    assert [rope.theta for rope in gemma3.ropes] == [1e4, 1e6]
    smollm3 = parse(model_type="smollm3", num_key_value_heads=2, pretraining_tp=2, no_rope_layer_interval=2)
    assert [block.mixer.rope is None for block in smollm3.blocks] == [False, True] and smollm3.ropes[0].theta == 2e6
    olmo3 = parse(model_type="olmo3", rope_scaling={"rope_type": "linear", "factor": 2.0}, num_hidden_layers=4)
    assert [block.mixer.rope.kind for block in olmo3.blocks] == ["default"] * 3 + ["linear"]


def test_what_transformers_writes_when_it_saves_is_read():
    moe = {"model_type": "qwen2_moe", "num_key_value_heads": 2}
    assert parse(**moe, use_sliding_window=False, sliding_window=0) == parse(**moe)
    with pytest.raises(ValueError, match="sliding_window=0, expected a whole number"):
        parse(**moe, use_sliding_window=True, sliding_window=0)
    hybrid = {**load_case("nemotron_h").config, "use_bias": True}
    assert parse(hybrid, mamba_proj_bias=False) == parse(hybrid)
    exaone = {"model_type": "exaone4", "num_key_value_heads": 2, "layer_types": ["full_attention", "sliding_attention"]}
    assert parse(**exaone, sliding_window_pattern=2) == parse(**exaone)
    kept = {"rope_type": "longrope", **LONG, "factor": 32.0}
    assert parse(rope_scaling=kept) == parse(
        rope_scaling={**kept, "original_max_position_embeddings": parse().max_position_embeddings}
    )
    mixtral = {"model_type": "mixtral", "num_key_value_heads": 2}
    assert parse(**mixtral, attention_bias=False) == parse(**mixtral)


def test_a_scale_of_zero_is_none_as_hf_takes_it():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert parse(rope_scaling={**yarn, "mscale": 0, "mscale_all_dim": 0.0}) == parse(rope_scaling=yarn)
    with pytest.raises(ValueError, match="mscale=False, expected a finite number"):
        parse(rope_scaling={**yarn, "mscale": False})
    devstral = {**yarn, "rope_theta": 1e6, "mscale": 1.0, "mscale_all_dim": 0.0, "llama_4_scaling_beta": 0.0}
    ministral = {**LLAMA, "model_type": "ministral3", "num_key_value_heads": 2}
    found = parse(ministral, rope_parameters=devstral)
    assert found.ropes[0].query_beta is None and found.ropes[0].mscale_all_dim is None
    assert parse(family_for(ministral).config_to_hf(found)) == found
    with pytest.raises(ValueError, match="llama_4_scaling_beta=-0.1, expected a finite number"):
        parse(ministral, rope_parameters={**devstral, "llama_4_scaling_beta": -0.1})


PUBLISHED = {
    "gpt_oss": {
        "initial_context_length": 4096, "experts_per_token": 4, "num_local_experts": 32, "swiglu_limit": 7.0,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "rope_theta": 150000, "router_aux_loss_coef": 0.9,
    },
    "glm4_moe": {
        "n_routed_experts": 160, "n_shared_experts": 1, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1, "use_qk_norm": True, "partial_rotary_factor": 0.5, "head_dim": 8,
    },
    "minimax_m2": {
        "attn_type_list": [1, 1], "head_dim": 8, "mtp_transformer_layers": 1, "num_mtp_modules": 3, "use_mtp": True,
        "auto_map": {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"}, "qk_norm_type": "per_layer",
        "rotary_dim": 4, "scoring_func": "sigmoid", "shared_intermediate_size": 0, "use_routing_bias": True,
    },
    "ernie4_5_moe": {
        "moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_use_aux_free": True, "moe_num_experts": 64, "moe_k": 6,
        "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1, "use_bias": False,
    },
    "hunyuan_v1_moe": {
        "moe_intermediate_size": [24, 24], "moe_topk": [8, 8], "num_experts": 64, "num_shared_expert": [1, 1],
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}, "use_cla": False, "use_qk_norm": True,
        "use_mixed_mlp_moe": True, "attention_head_dim": 4, "mlp_bias": False,
    },
    "llama4_text": {
        "attn_temperature_tuning": 4, "for_llm_compressor": False, "no_rope_layers": [], "moe_layers": [0, 1],
        "floor_scale": 8192, "attn_scale": 0.1, "intermediate_size_mlp": 48, "cache_implementation": "hybrid",
    },
}  # fmt: skip
"""Keys of published files, beyond those that all families read, with their values or smaller ones."""


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_published_files_with_experts_are_read(model_type):
    published, _ = without_quantization(PUBLISHED[model_type])
    config = parse(model_type=model_type, num_key_value_heads=2, **published)
    assert config.model_type == model_type and config.experts is not None
    family = family_for({"model_type": model_type})
    assert family.config_from_hf(family.config_to_hf(config)) == config


def test_the_text_model_of_llama_4_is_read_from_its_parent():
    keys = {"model_type": "llama4_text", "num_key_value_heads": 2, "tie_word_embeddings": False}
    text = {**LLAMA, **keys, **PUBLISHED["llama4_text"]}
    parent = {"model_type": "llama4", "text_config": text, "vision_config": {}, "image_token_index": 200092}
    assert parse(parent) == parse(text)
    names = ("language_model.model.norm.weight", "vision_model.patch.weight", "multi_modal_projector.linear_1.weight")
    assert family_for(parent).own_names(names, parent) == {"model.norm.weight": names[0]}


EXPERTS = {**QWEN2, "model_type": "qwen3_moe", "num_experts_per_tok": 2, "moe_intermediate_size": 12}


def test_experts_are_counted_under_the_names_of_transformers_4_and_5():
    assert parse(EXPERTS, num_local_experts=8) == parse(EXPERTS, num_experts=8)
    assert parse(EXPERTS, num_local_experts=8).num_experts == 8
    with pytest.raises(ValueError, match="num_local_experts=6, expected the same as num_experts=8"):
        parse(EXPERTS, num_local_experts=6, num_experts=8)
    with pytest.raises(ValueError, match="num_local_experts='8', expected a whole number"):
        parse(EXPERTS, num_local_experts="8")


def test_keys_that_libraries_write_and_do_not_read_change_nothing():
    kinds = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}
    gemma3 = functools.partial(parse, model_type="gemma3_text", head_dim=8, num_key_value_heads=2, rope_theta=None)
    plain = gemma3(rope_parameters=kinds)
    beside = {"rope_parameters": {**kinds, "rope_type": "default", "rope_theta": None}, "_sliding_window_pattern": 2}
    beside["use_qk_norm"] = True
    assert gemma3(**beside) == plain


@pytest.mark.parametrize(
    "case, changes, message",
    [
        ("deepseek_v3", {"num_nextn_predict_layers": 2**31 - 1}, "_layers=2147483647, expected at most"),
        ("kimi_linear", {"num_hidden_layers": 2**31 - 1}, "expected each of the layers 1 to 2147483647 once"),
        ("kimi_linear", {"model_max_length": float("nan")}, "model_max_length=nan, expected a whole number"),
        ("kimi_linear", {"model_type": ["llama"]}, "model_type=.'llama'., expected one of"),
    ],
)
def test_a_number_that_nothing_can_hold_is_refused_at_once(case, changes, message):
    raw = {**load_case(case).config, **changes}
    with pytest.raises(ValueError, match=message):
        family = family_for(raw)
        family.config_from_hf(raw)
        family.unused_names(raw)
