"""Mistral 3, its text model: a Mistral (Mistral Small 3.1), a Ministral 3 or a Mistral 4 (Mistral Small 4)."""

from levanter_infer.models.ministral3 import MINISTRAL3
from levanter_infer.models.mistral import MISTRAL
from levanter_infer.models.mistral4 import MISTRAL4
from levanter_infer.models.multimodal import LLAVA_PREFIXES, LLAVA_UNUSED, Parent

MISTRAL3_WITH_VISION = Parent(
    "mistral3",
    "Mistral3ForConditionalGeneration",
    texts=(MISTRAL, MINISTRAL3, MISTRAL4),
    others=(
        *("vision_config", "vision_feature_layer", "image_token_index", "image_token_id"),
        *("projector_hidden_act", "multimodal_projector_bias", "spatial_merge_size"),
    ),
    prefixes=LLAVA_PREFIXES,
    unused=LLAVA_UNUSED,
)
