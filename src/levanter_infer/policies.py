"""The choices of a configuration by name: each is an enum, written here and nowhere else.

Imports nothing of the package, so that the host's scheduler, the command line and device code share one list. A member
equals its plain string, which is what users and YAML files write.
"""

import enum


class Option(enum.StrEnum):
    """One of a few named values."""

    def __repr__(self) -> str:
        return repr(self.value)  # in messages as the user writes it

    @classmethod
    def listed(cls) -> str:
        """The values in words: `a, b or c`."""
        *most, last = cls
        return f"{', '.join(most)} or {last}" if most else last


class AttentionImpl(Option):
    """Implementation of paged attention."""

    AUTO = "auto"
    XLA = "xla"
    REFERENCE = "reference"
    CPU = "cpu"
    GPU = "gpu"
    TPU = "tpu"


class MatmulImpl(Option):
    """Implementation of matmuls."""

    AUTO = "auto"
    XLA = "xla"
    CPU = "cpu"
    GPU = "gpu"
    TPU = "tpu"


class CpuIsa(Option):
    """Instruction set of the CPU kernels. After `auto` the widest first: a processor that has one of them has the
    following ones too."""

    AUTO = "auto"
    AMX_BF16 = "amx_bf16"
    AVX512_BF16 = "avx512_bf16"
    AVX512 = "avx512"
    AVX2 = "avx2"
    GENERIC = "generic"


class WeightDtype(Option):
    """dtype of stored weights, where it is not that of the checkpoint."""

    INT8 = "int8"


class KvDtype(Option):
    """dtype of the stored keys and values."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    INT8 = "int8"
    FLOAT8 = "float8_e4m3fn"


class AdmissionPolicy(Option):
    """Free pages that a sequence needs to start."""

    OPTIMISTIC = "optimistic"
    EXPECTED = "expected"
    WORST_CASE = "worst_case"


class PreemptionPolicy(Option):
    """Fate of the pages of a preempted sequence."""

    RECOMPUTE = "recompute"
    OFFLOAD = "offload"


class Numerics(Option):
    """Inputs that the bits of a result may depend on."""

    DEFAULT = "default"
    BATCH_INVARIANT = "batch_invariant"


class Recompilation(Option):
    """Reaction to a recompilation in a warm engine."""

    ERROR = "error"
    WARN = "warn"


class WeightSwapPolicy(Option):
    """Treatment of the sequences on the device when the weights change."""

    DRAIN = "drain"
    KEEP_KV = "keep_kv"
    RECOMPUTE = "recompute"


class FinishReason(Option):
    """Why a sample ended."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"
    ABORT = "abort"


class ToolCallParser(Option):
    """The format in which a model writes tool calls."""

    NONE = "none"
    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"
