"""`Model` names what an engine uses of a model, and nothing that it does not use."""

import ast
import inspect
from pathlib import Path

from levanter_infer.models.decoder import DecoderModel
from levanter_infer.models.protocol import Model

SOURCE = Path(__file__).resolve().parents[2] / "src" / "levanter_infer"
USERS = [*SOURCE.glob("decode/*.py"), *SOURCE.glob("engine/*.py"), *SOURCE.glob("layers/layout.py")]
MEMBERS = {name for name in vars(Model) if not name.startswith("_")}
STORED = {"types", "read"}
"""Members of `StoredModel`, which is asked for its model before anything else."""


def used_of_models() -> set[str]:
    names = {"model", "types"}
    nodes = (node for path in USERS for node in ast.walk(ast.parse(path.read_text())))
    return {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names
    }


def test_the_engine_uses_the_members_of_the_protocol_and_no_others():
    used = used_of_models() - STORED
    assert used <= MEMBERS, f"not in models/protocol.py: {used - MEMBERS}"
    # sharding: `Layout.fit_model(model).shard_as(layout)` has no name for what it calls
    assert MEMBERS - used <= {"shard_as"}, f"used by no part of the engine: {MEMBERS - used}"


def test_the_decoder_has_them_with_the_same_parameters():
    for name in MEMBERS:
        ours, wanted = inspect.getattr_static(DecoderModel, name, None), inspect.getattr_static(Model, name)
        if isinstance(wanted, property):
            assert isinstance(ours, property) or name in DecoderModel.__dataclass_fields__, name
        else:
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(wanted).parameters), name
