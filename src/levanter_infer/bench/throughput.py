"""Prefill and decode rates of a random model of given shape, greedy and sampled.

Prefill is timed as the whole call that samples one token per prompt, decode as the difference to the call that
samples `output` more; the two are run in turn, so that a slow moment of the machine hits both.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np

from levanter_infer.bench.report import digest, emit, provenance, spread
from levanter_infer.engine.config import EngineConfig
from levanter_infer.engine.engine import InferenceEngine
from levanter_infer.engine.params import SamplingParams
from levanter_infer.engine.request import Request
from levanter_infer.models.decoder import DecoderModel
from levanter_infer.models.llama import LLAMA

MODES = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 1.0, "top_p": 0.95, "top_k": 50}}


def run(args) -> None:
    """Print one line per mode and batch size."""
    about = provenance()
    model = random_model(args)
    for batch in args.batch:
        engine = InferenceEngine(
            model,
            config=EngineConfig(max_seqs=batch, max_seq_len=_round_up(args.prompt + args.output + 1, 16)),
        )
        for mode in args.modes.split(","):
            emit({"bench": "throughput", **measure(engine, args, batch, mode), **about})


def random_model(args) -> DecoderModel:
    """A Llama of the given shape with random weights."""
    config = LLAMA.config_from_hf(
        {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": args.hidden,
            "num_hidden_layers": args.layers,
            "num_attention_heads": args.heads,
            "num_key_value_heads": args.kv_heads,
            "intermediate_size": args.mlp,
            "vocab_size": args.vocab,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 100000.0,
            "tie_word_embeddings": True,
        }
    )
    return DecoderModel.init(config, key=jax.random.key(0), dtype=jnp.dtype(args.dtype))


def measure(engine: InferenceEngine, args, batch: int, mode: str) -> dict[str, object]:
    rng = np.random.default_rng(batch)
    prompts = rng.integers(0, args.vocab, (batch, args.prompt)).tolist()

    def requests(max_tokens: int) -> list[Request]:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=0, **MODES[mode])
        return [Request(prompt_token_ids=prompt, sampling=sampling) for prompt in prompts]

    def timed(max_tokens: int):
        start = time.perf_counter()
        outputs = engine.generate(requests(max_tokens))
        return time.perf_counter() - start, outputs

    timed(1 + args.output)  # compiles
    prefill, decode, whole, outputs = [], [], [], []
    for _ in range(args.repeats):
        short, _ = timed(1)
        long, outputs = timed(1 + args.output)
        prefill.append(batch * args.prompt / short)
        decode.append(batch * args.output / max(long - short, 1e-9))
        whole.append(batch * (1 + args.output) / long)
    return {
        "mode": mode,
        "batch": batch,
        "prompt": args.prompt,
        "output": args.output,
        "prefill_tokens_per_s": spread(prefill, 1),
        "decode_tokens_per_s": spread(decode, 1),
        "generated_tokens_per_s": spread(whole, 1),
        "config": {
            "model": {k: getattr(args, k) for k in ("hidden", "layers", "heads", "kv_heads", "mlp", "vocab")},
            "dtype": args.dtype,
            "sampling": MODES[mode],
            "engine": {k: v for k, v in engine.describe().items() if k != "device"},
        },
        "workload_hash": digest([prompts, mode, args.output]),
        "output_hash": digest([c.token_ids for o in outputs for c in o.completions]),
        "compilations": engine.stats()["compilations"],
    }


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
