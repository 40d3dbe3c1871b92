"""llama.cpp as one side of `run.py`. Runs in an environment without this package."""

from pathlib import Path

import llama_cpp
import numpy as np
from protocol import serve, untimed
from to_gguf import convert


def start(setup: dict):
    checkpoint = Path(setup["checkpoint"])
    path = checkpoint / f"{setup['dtype']}.gguf"
    if not path.exists():
        convert(checkpoint, path, setup["dtype"])
    batch, longest = setup["batch"], setup["prompt"] + setup["output"] + 1
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_seq_max = batch
    params.n_ctx = batch * (-(-longest // 256) * 256)
    params.n_batch = batch * setup["prompt"]
    params.n_threads = params.n_threads_batch = setup["threads"]
    if setup["dtype"] == "float32":
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32  # the default is float16
    context = llama_cpp.llama_init_from_model(model, params)
    if context is None:
        raise RuntimeError(f"llama.cpp gave no context for {path}")
    memory = llama_cpp.llama_get_memory(context)
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    tokens = llama_cpp.llama_batch_init(batch * setup["prompt"], 0, 1)

    def step(rows: list[list[int]], position: int) -> list[int]:
        """The next token of each sequence after `rows`, which stand at `position` and the places behind it."""
        tokens.n_tokens = 0
        for sequence, row in enumerate(rows):
            for offset, token in enumerate(row):
                i = tokens.n_tokens
                tokens.token[i], tokens.pos[i] = token, position + offset
                tokens.n_seq_id[i], tokens.seq_id[i][0] = 1, sequence
                tokens.logits[i] = offset == len(row) - 1
                tokens.n_tokens = i + 1
        status = llama_cpp.llama_decode(context, tokens)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status} for {tokens.n_tokens} tokens")
        read = llama_cpp.llama_get_logits(context)
        # llama.cpp's own greedy sampler copies every logit into a struct first; the largest is looked for here instead,
        # and is none of llama.cpp's time. The other sides' sampling counts.
        with untimed():
            return np.ctypeslib.as_array(read, (len(rows), vocab)).argmax(axis=-1).tolist()

    def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
        llama_cpp.llama_memory_clear(memory, False)
        steps = [step(prompts, 0)]
        for i in range(count - 1):
            steps.append(step([[token] for token in steps[-1]], len(prompts[0]) + i))
        return [list(sequence) for sequence in zip(*steps, strict=True)]

    return generate


if __name__ == "__main__":
    serve(start, ("llama-cpp-python",))
