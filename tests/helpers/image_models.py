"""Small fresh models that read images, with what makes their pixels: one of each family."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForImageTextToText

from postgrad.core.ragged import Ragged
from postgrad.core.records import PlacedImage, Sequences
from postgrad.models.attention import implementation_of
from postgrad.models.images import Pixels
from postgrad.models.states import carry_states

PLACEHOLDER, START, END = 90, 91, 92  # token ids
VOCABULARY = 96
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 100.0}
QWEN = {
    "image_token_id": PLACEHOLDER, "video_token_id": 93, "vision_start_token_id": START,
    "vision_end_token_id": END, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True)
class ImageModel:
    """A model's config, and for a size of image in patches its pixels and (rows, columns)."""

    config: Callable[[], Any]
    pixels: Callable[[np.random.Generator, int, int], Pixels]
    grid: bool  # rotary positions have three components
    mutual: bool  # tokens of an image see each other
    types: str | None  # the argument of transformers' forward that says which tokens are images'
    size: tuple[int, int] = (2, 2)  # rows and columns of tokens, where images have one size
    rounding: float = 1e-5  # by how much logprobs in float32 differ


def _qwen_pixels(generator: np.random.Generator, rows: int, columns: int) -> Pixels:
    patches = generator.normal(size=(rows * columns * 4, 3 * 2 * 4 * 4)).astype(np.float32)
    return {
        "pixel_values": patches,
        "image_grid_thw": np.array([[1, 2 * rows, 2 * columns]], np.int64),
    }


def _square_pixels(generator: np.random.Generator, rows: int, columns: int) -> Pixels:
    return {"pixel_values": generator.normal(size=(1, 3, 16, 16)).astype(np.float32)}


def _qwen2_5() -> Any:
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32,
        "window_size": 16, "fullatt_block_indexes": [1],
    }  # fmt: skip
    text = {**TEXT, "rope_parameters": MROPE}
    return AutoConfig.for_model("qwen2_5_vl", text_config=text, vision_config=vision, **QWEN)


QWEN3_VISION = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32,
    "num_position_embeddings": 16,
}  # fmt: skip
QWEN3_ROPE = {**MROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def _qwen3(kind: str, **more: Any) -> Any:
    """Qwen3-VL. more: of the decoder."""
    vision = {**QWEN3_VISION, "deepstack_visual_indexes": [0, 1]}
    text = {**TEXT, "head_dim": 8, "rope_parameters": QWEN3_ROPE, **more}
    return AutoConfig.for_model(kind, text_config=text, vision_config=vision, **QWEN)


def _qwen3_5(kind: str, **more: Any) -> Any:
    """Qwen3.5, whose first and third layers are gated delta rules. more: of the decoder."""
    text = {
        **TEXT, "head_dim": 16, "rope_parameters": {**QWEN3_ROPE, "partial_rotary_factor": 0.5},
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, **more,
    }  # fmt: skip
    return AutoConfig.for_model(kind, text_config=text, vision_config=QWEN3_VISION, **QWEN)


def _gemma3() -> Any:
    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 16, "patch_size": 4,
    }  # fmt: skip
    plain = {"rope_type": "default", "rope_theta": 100.0}
    text = {
        **TEXT, "head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"full_attention": plain, "sliding_attention": plain},
    }  # fmt: skip
    return AutoConfig.for_model(
        "gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4,
        image_token_id=PLACEHOLDER, boi_token_id=START, eoi_token_id=END,
    )  # fmt: skip


def _tile_pixels(generator: np.random.Generator, rows: int, columns: int) -> Pixels:
    return {"pixel_values": generator.normal(size=(1, 1, 3, 16, 16)).astype(np.float32)}


ROPE = {"rope_type": "default", "rope_theta": 100.0}
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 4,
}  # fmt: skip


def _text(kind: str) -> dict[str, Any]:
    return {**TEXT, "model_type": kind, "head_dim": 8, "rope_parameters": ROPE}


def _tiled(kind: str) -> Any:
    """SmolVLM and Idefics 3."""
    text = {**TEXT, "model_type": "llama", "rope_parameters": ROPE}
    return AutoConfig.for_model(
        kind, text_config=text, vision_config=VISION, image_token_id=PLACEHOLDER,
        scale_factor=2, tie_word_embeddings=False,
    )  # fmt: skip


def _llava() -> Any:
    """CLIP's tower, whose last layer nobody reads, and whose first token is left out."""
    vision = {**VISION, "model_type": "clip_vision_model", "image_size": 8, "num_hidden_layers": 3}
    return AutoConfig.for_model(
        "llava", text_config=_text("llama"), vision_config=vision, image_token_index=PLACEHOLDER
    )


def _vipllava() -> Any:
    vision = {**VISION, "model_type": "clip_vision_model", "image_size": 8, "num_hidden_layers": 3}
    return AutoConfig.for_model(
        "vipllava", text_config=_text("llama"), vision_config=vision,
        image_token_index=PLACEHOLDER, vision_feature_layer=[-2, 1],
    )  # fmt: skip


def _llava_next() -> Any:
    vision = {**VISION, "model_type": "clip_vision_model", "image_size": 8, "num_hidden_layers": 3}
    return AutoConfig.for_model(
        "llava_next", text_config=_text("mistral"), vision_config=vision,
        image_token_index=PLACEHOLDER, image_grid_pinpoints=PINPOINTS,
    )  # fmt: skip


def _llava_onevision() -> Any:
    vision = {
        **VISION, "model_type": "siglip_vision_model", "image_size": 8, "vision_use_head": False,
    }  # fmt: skip
    return AutoConfig.for_model(
        "llava_onevision", text_config=_text("qwen2"), vision_config=vision,
        image_token_index=PLACEHOLDER, video_token_index=93, image_grid_pinpoints=PINPOINTS,
        vision_aspect_ratio="anyres_max_2",
    )  # fmt: skip


PINPOINTS = [[8, 16], [16, 8], [16, 16]]


def _anyres_pixels(generator: np.random.Generator, rows: int, columns: int) -> Pixels:
    """An image of 8 x 14 pixels, on two tiles of 8 x 8: without padding 2 x 4 tokens and 2 marks,
    and 2 x 2 of the whole image.
    """
    pixels = generator.normal(size=(1, 3, 3, 8, 8)).astype(np.float32)
    return {"pixel_values": pixels, "image_sizes": np.array([[8, 14]], np.int64)}


def _small_square_pixels(generator: np.random.Generator, rows: int, columns: int) -> Pixels:
    return {"pixel_values": generator.normal(size=(1, 3, 8, 8)).astype(np.float32)}


def _mistral3() -> Any:
    vision = {**VISION, "model_type": "pixtral", "rope_parameters": {**ROPE, "rope_type": "axial"}}
    yarn = {
        "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1,
    }  # fmt: skip
    text = {**_text("ministral3"), "rope_parameters": yarn}
    return AutoConfig.for_model(
        "mistral3", text_config=text, vision_config=vision, image_token_index=PLACEHOLDER,
        tie_word_embeddings=False,
    )  # fmt: skip


def _sized_pixels(generator: np.random.Generator, rows: int, columns: int) -> Pixels:
    return {**_square_pixels(generator, rows, columns), "image_sizes": np.array([[16, 16]])}


def _internvl() -> Any:
    return AutoConfig.for_model(
        "internvl", text_config=_text("qwen3"), vision_config=VISION, image_token_id=PLACEHOLDER,
        image_seq_length=4,
    )  # fmt: skip


def _qwen(config: Callable[[], Any]) -> ImageModel:
    # norms behind delta rules divide by states that are nearly 0 for the first tokens
    rounding = 1e-4 if hasattr(config().text_config, "linear_key_head_dim") else 1e-5
    types = "mm_token_type_ids"
    return ImageModel(config, _qwen_pixels, True, False, types, rounding=rounding)


IMAGE_MODELS = {
    "qwen2_5_vl": _qwen(_qwen2_5),
    "qwen3_vl": _qwen(partial(_qwen3, "qwen3_vl")),
    "qwen3_vl_moe": _qwen(partial(_qwen3, "qwen3_vl_moe", **EXPERTS)),
    "qwen3_5": _qwen(partial(_qwen3_5, "qwen3_5")),
    "qwen3_5_moe": _qwen(
        partial(_qwen3_5, "qwen3_5_moe", shared_expert_intermediate_size=24, **EXPERTS)
    ),
    "gemma3": ImageModel(_gemma3, _square_pixels, False, True, "token_type_ids"),
    "smolvlm": ImageModel(partial(_tiled, "smolvlm"), _tile_pixels, False, False, None),
    "llava": ImageModel(_llava, _small_square_pixels, False, False, None),
    "llava_next": ImageModel(_llava_next, _anyres_pixels, False, False, None, (2, 7)),
    "llava_onevision": ImageModel(_llava_onevision, _anyres_pixels, False, False, None, (2, 7)),
    "mistral3": ImageModel(_mistral3, _sized_pixels, False, False, None),
    "internvl": ImageModel(_internvl, _square_pixels, False, False, None),
    "vipllava": ImageModel(_vipllava, _small_square_pixels, False, False, None),
    "idefics3": ImageModel(partial(_tiled, "idefics3"), _tile_pixels, False, False, None),
}
LIKE_OTHERS = (
    "qwen3_5_moe",
    "llava_next",
    "llava_onevision",
    "mistral3",
    "internvl",
    "vipllava",
    "idefics3",
)
KINDS = [
    pytest.param(kind, marks=pytest.mark.slow) if kind in LIKE_OTHERS else kind
    for kind in IMAGE_MODELS
]
FEW = ("qwen2_5_vl", "qwen3_5", "gemma3")  # of the fast suite, where a case takes half a second


def but_for_a_few(kinds: Iterable[str]) -> list[Any]:
    """The kinds, all of them slow but FEW."""
    return [kind if kind in FEW else pytest.param(kind, marks=pytest.mark.slow) for kind in kinds]


# For whole runs, on rows of which some have two images.
RUNS = [
    pytest.param(kind, marks=pytest.mark.slow if kind == "llava" else pytest.mark.long)
    if kind == "llava" or kind in LIKE_OTHERS
    else kind
    for kind in IMAGE_MODELS
    if kind != "llava_onevision"
]


def fresh(kind: str, implementation: str | None = None) -> Any:
    """A model with weights of its own scale in every dimension, the same at each call."""
    config = IMAGE_MODELS[kind].config()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        lm = AutoModelForImageTextToText.from_config(
            config,
            attn_implementation=implementation or implementation_of(config),
            dtype=torch.float32,
        )
        with torch.no_grad():
            for parameter in lm.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, parameter[0].numel() ** -0.5)
        if implementation is None:
            carry_states(lm)
    return lm.eval()


def looped(lm: Any) -> Any:
    """A model that computes experts one after the other, in float64 too; a dense one as it is."""
    if getattr(lm.config.get_text_config(), "num_experts", 0):
        lm.set_experts_implementation("eager")
    return lm


def placeholders(count: int) -> NDArray[np.int32]:
    """The tokens of an image of `count` tokens."""
    return np.array([START, *[PLACEHOLDER] * count, END], np.int32)


SIZES = ((2, 3), (3, 1))  # rows and columns of tokens; Gemma's images have 2 x 2


def placed(ids: Any, digests: list[str], sizes: Any, model: Any) -> tuple[PlacedImage, ...]:
    at, images = np.flatnonzero(ids == PLACEHOLDER), []
    for digest, (rows, columns) in zip(digests, sizes, strict=True):
        own_places, at = at[: rows * columns], at[rows * columns :]
        grid = (rows, columns) if model.grid else None
        images.append(PlacedImage(digest, own_places, grid, model.mutual))
    return tuple(images)


class Scene:
    """Two samples of a prompt with two images, one of a prompt with one, and one without images."""

    def __init__(self, kind: str) -> None:
        self.model = model = IMAGE_MODELS[kind]
        generator = np.random.default_rng(3)
        sizes = SIZES if model.grid else (model.size, model.size)
        digests = [hashlib.sha256(bytes([n])).hexdigest() for n in range(2)]
        self.pixels: dict[str, Pixels] = {
            digest: model.pixels(generator, *size)
            for digest, size in zip(digests, sizes, strict=True)
        }
        spans = [placeholders(rows * columns) for rows, columns in sizes]

        def text(count: int) -> Any:
            return generator.integers(3, 80, count).astype(np.int32)

        both = np.concatenate([text(3), spans[0], text(2), spans[1], text(4)])
        tokens = [
            np.concatenate([both, text(5)]),
            np.concatenate([both, text(7)]),
            np.concatenate([text(2), spans[1], text(9)]),
            text(12),
        ]
        shown = [digests, digests, digests[1:], []]
        self.sequences = Sequences(
            Ragged.of(tokens, np.int32),
            Ragged.of([np.arange(len(t)) >= len(t) - 4 for t in tokens], np.bool_),
            np.array([0, 0, 1, 2]),
            images=tuple(
                placed(ids, named, sizes[-len(named) :] if named else (), model)
                for ids, named in zip(tokens, shown, strict=True)
            ),
        )

    def arguments(self, ids: torch.Tensor, images: tuple[PlacedImage, ...]) -> dict[str, Any]:
        """What transformers' own forward takes of the images of one sequence, ids [1, T]."""
        pixels = [self.pixels[image.digest] for image in images]
        named: dict[str, Any] = {
            name: torch.from_numpy(np.concatenate([p[name] for p in pixels]))
            for name in (pixels[0] if pixels else ())
        }
        if pixels and self.model.types is not None:
            named[self.model.types] = (ids == PLACEHOLDER).int()
        return named
