"""Every axis name of the project, once, with its meaning, and sizes on which several parts agree.

An axis is a value (`haliax.Axis`), made where its size is known; the names stand here so that one name has one
meaning everywhere. Weight axes keep Levanter's names, so that sharding rules carry over.
"""

# Meshes of devices
DATA = "data"  # engines with tables of their own, side by side; also the axis over which their tables are stacked
MODEL = "model"  # devices that hold a model's weights and heads together

# Weights
LAYERS = "layers"  # decoder layers, the leading axis of stacked parameters and of the page pool
PERIOD = "period"  # layers of one stack that a period of the layer loop has
DEPTH = "depth"  # decoder layers, where what is stored is not stacked by layers
EMBED = "embed"  # width of the residual stream
MLP = "mlp"  # inner width of the feed-forward block
EXPERT = "expert"  # feed-forward blocks of which each token uses a few; also the mesh axis over which they are sharded
EXPERT_LATENT = "expert_latent"  # numbers to which a token is reduced before its experts, where they see no more
LAYER_INPUT = "layer_input"  # numbers of a token that one layer gets beside the residual stream
NORM_GATE = "norm_gate"  # inner width of the gate of a norm
SHARED_GATE = "shared_gate"  # the one number by which the result of a shared expert is multiplied
SCALAR = "scalar"  # the one number of a parameter that is a number
VOCAB = "vocab"  # token ids
KV_HEADS = "kv_head"  # key/value heads
Q_HEADS_PER_GROUP = "q_heads_per_group"  # query heads that share one key/value head
HEADS = "heads"  # all query heads, those of one key/value head side by side, in Levanter's output projections
HEAD_SIZE = "head_size"  # width of one head
CHANNEL = "channel"  # one of a short convolution, which mixes positions and no channels
TAP = "tap"  # weights of one channel of a short convolution, the latest input last
PART = "part"  # the two gates and the input of a short convolution, which one matmul computes
STATE_HEAD = "state_head"  # heads of a recurrence, each with a matrix of its own
STATE_GROUP = "state_group"  # heads of Mamba-2 that share what its state is written and read with
KEY_SIZE = "key_size"  # rows of that matrix: the width of a key and of a query
VALUE_SIZE = "value_size"  # its columns
GATE_RANK = "gate_rank"  # numbers from which Kimi delta attention computes the decays, or the gate, of all channels
LATENT = "latent"  # numbers from which latent attention computes the keys and values of all heads of a token
Q_LATENT = "q_latent"  # numbers from which it computes their queries
INDEX_HEADS = "index_head"  # heads of an indexer, which chooses the keys of attention
INDEX_WEIGHT = "index_weight"  # the weight of each of its heads, which a token has
PANEL = "panel"  # groups of outputs whose weights a CPU reads together
PANEL_SIZE = "panel_size"  # the weights of one panel

# Sequences
SEQ = "seq"  # slot: a sequence's row in the tables of `DecodeState`
POSITION = "position"  # place of a token within its sequence
ROW = "row"  # one sequence that takes part in the current step
ROW_BOUND = "row_bound"  # boundaries between rows: one more than ROW
TOKEN = "token"  # packed token of the current step

# Pages
PAGE = "page"  # the pool
WINDOW_PAGE = "window_page"  # the pool of the layers with one sliding window
SNAPSHOT = "snapshot"  # states of fixed size that prefix caching keeps
STATE = "state"  # start of the names of the axes of what a recurrent layer remembers of one sequence
SEQ_PAGE = "seq_page"  # the pages of one sequence, in logical order
PAGE_OFFSET = "page_offset"  # token within a page
BUCKET_ROW = "bucket_row"  # rows of several buckets, of the table by which full pages are found
WAY = "way"  # pages of the buckets of a row
KV_PAIR = "kv_pair"  # keys and values of all heads, interleaved k0, v0, k1, v1, ...

# Sampling
AUTOMATON = "automaton"  # constraints of structured output that the tables hold
ENTRY = "entry"  # transitions of all automata
MASK = "mask"  # sets of tokens that may follow
WORD = "word"  # 32 tokens of one set
BIAS = "bias"  # entries of a request's logit bias
STOP = "stop"  # stop token sequences of a request
STOP_TOKEN = "stop_token"  # tokens of all stop sequences of a request, each right-aligned
SEED_WORD = "seed_word"  # the two 32-bit words of a 64-bit seed, high word first
TOP = "top"  # the likeliest tokens of a position
SCORE = "score"  # numbers of the score of one token

# Host and device
OUTPUT = "output"  # entries of the output ring, one per sampled token
ADMITTED = "admitted"  # pieces of requests in one Admission
UPLOAD = "upload"  # packed tokens of one Admission

VOCAB_GROUPS = 16
"""Groups of the vocabulary; each device of a model axis holds equally many. `decode.sampling_draw` adds up one entry of
every group at once."""


def check_model_axis(size: int) -> None:
    """Raises: ValueError for a size of the mesh's model axis that does not divide `VOCAB_GROUPS`."""
    if VOCAB_GROUPS % size:
        *most, last = (str(n) for n in range(1, VOCAB_GROUPS + 1) if VOCAB_GROUPS % n == 0)
        raise ValueError(f"mesh.model={size}: expected one of {', '.join(most)} or {last}")
