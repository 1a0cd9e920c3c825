"""What follows from the config of a model that reads images: arithmetic and sizes of its tower.

Free of torch and transformers, as models.shapes. A tower encodes the patches of an image in layers
of its own; the projector turns squares of patches into tokens of the decoder.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from postgrad.models.flops import MULTIPLY_ADD, ForwardFlops
from postgrad.models.settings import ANY_SIZE

CHANNELS = 3
# How an image becomes patches and tokens: "grid": in its proportions, with positions of rows and
# columns; "square": one of a fixed size; "whole": the same, without marks around it; "tiles": tiles
# by row and column, and the whole; "crops": crops in the best proportions, and the whole; "anyres":
# the whole, and tiles without their padding, a mark behind each row; "rows": in its proportions, a
# mark behind each row.
ImageCut = Literal["grid", "square", "whole", "tiles", "crops", "anyres", "rows"]
CUTS: dict[str, ImageCut] = {
    "gemma3": "square",
    "idefics3": "tiles",
    "internvl": "crops",
    "llava": "whole",
    "llava_next": "anyres",
    "llava_onevision": "anyres",
    "mistral3": "rows",
    "qwen2_5_vl": "grid",
    "qwen3_5": "grid",
    "qwen3_5_moe": "grid",
    "qwen3_vl": "grid",
    "qwen3_vl_moe": "grid",
    "smolvlm": "tiles",
    "vipllava": "whole",
}
# Numbers of pixels in one call of a learner's tower: 900 patches of Qwen-VL, or 3 pictures of
# CLIP's size. More would take memory and save few calls. One image alone may have more.
AT_ONCE = 2**20
KEPT_BYTES = 2**28  # of processed images that a process keeps, for all of its models
CLASSED = ("clip_vision_model", "internvl_vision")  # towers that put a token in front


@dataclass(frozen=True, slots=True)
class ImageCost:
    """What images bring, as sums over those of a row, or means over rows."""

    images: float = 0.0
    patches: float = 0.0
    tokens: float = 0.0  # that get an embedding
    full_pairs: float = 0.0  # pairs of patches that see each other, in a layer without windows
    window_pairs: float = 0.0  # the same in a layer with windows

    def __add__(self, other: "ImageCost") -> "ImageCost":
        return ImageCost(
            self.images + other.images,
            self.patches + other.patches,
            self.tokens + other.tokens,
            self.full_pairs + other.full_pairs,
            self.window_pairs + other.window_pairs,
        )

    def times(self, count: float) -> "ImageCost":
        """That of `count` such rows."""
        return ImageCost(
            count * self.images,
            count * self.patches,
            count * self.tokens,
            count * self.full_pairs,
            count * self.window_pairs,
        )


@dataclass(frozen=True, slots=True)
class TowerShape:
    """The sizes of a tower and its projector. Example values: Qwen2.5-VL-7B."""

    model_type: str  # "qwen2_5_vl"
    cut: ImageCut  # "grid"
    hidden_size: int  # 1280
    intermediate_size: int  # 3420
    layers: int  # 32
    gated: bool  # a feed-forward has three matrices, else two: True
    patch_size: int  # pixels of a patch's side: 14
    patch_values: int  # numbers of a patch, over the frames that it spans: 1176
    merged: int  # patches of a token's side: 2
    image_size: int  # pixels of the side of an image or tile; 0: images have any size
    window: int  # patches of the side of a window; 0: no layer has windows
    full_layers: int  # layers without windows: 4
    projections: tuple[tuple[int, int], ...]  # (inputs, outputs) of each product for a token
    parameters: int  # of the tower, without the projector
    projector_parameters: int
    more_tokens: int = 0  # as the function of this name
    most_tiles: int = 0  # the same
    class_tokens: int = 0  # in front of the patches of an image or tile: CLIP's and InternVL's 1
    activation: str = "gelu"
    scaled: bool = False  # what a layer adds is multiplied by a weight (InternVL)

    @property
    def rms(self) -> bool:
        """Whether its norms are RMSNorms, computed in float32; others are LayerNorms."""
        return self.gated

    def encoded(self, cost: ImageCost) -> float:
        """Tokens that layers compute: the patches, and a class in front of those of each tile."""
        if not self.class_tokens:
            return cost.patches
        return cost.patches * (1 + self.class_tokens / (self.image_size // self.patch_size) ** 2)

    @property
    def mergers(self) -> int:
        """Projectors side by side: the last layer's, and of layers between (Qwen3-VL)."""
        return max(1, len(self.projections) // 2)

    @property
    def layer_matrix_parameters(self) -> int:
        """Weights of one layer in products with patches."""
        inner = (3 if self.gated else 2) * self.intermediate_size
        return self.hidden_size * (4 * self.hidden_size + inner)

    def frozen(self, freeze: Collection[str]) -> int:
        """How many weights model.freeze keeps as they are."""
        tower = self.parameters if "vision" in freeze else 0
        return tower + (self.projector_parameters if "projector" in freeze else 0)

    def encoding(self, cost: ImageCost) -> ForwardFlops:
        """Operations of one forward pass of the tower. Every patch of an image, a tile or a window
        sees every other: two products over all pairs.
        """
        embedding = cost.patches * self.patch_values * self.hidden_size
        layers = self.encoded(cost) * self.layers * self.layer_matrix_parameters
        windowed = self.layers - self.full_layers
        pairs = self.full_layers * cost.full_pairs + windowed * cost.window_pairs
        return ForwardFlops(
            body=MULTIPLY_ADD * (embedding + layers),
            attention=2 * MULTIPLY_ADD * pairs * self.hidden_size,
            head=0.0,
        )

    def projecting(self, cost: ImageCost) -> float:
        """Operations of one forward pass of the projector."""
        return MULTIPLY_ADD * cost.tokens * sum(m * n for m, n in self.projections)


def tower_shape(
    config: Mapping[str, Any], *, parameters: int, projector_parameters: int
) -> TowerShape:
    """The shape of the tower of a config of IMAGE_TYPES, with all of its keys as transformers fills
    them in. parameters, projector_parameters: as they were counted.
    """
    kind, vision, text = config["model_type"], config["vision_config"], config["text_config"]
    cut = cut_of(config)
    hidden, patch = int(vision["hidden_size"]), side_of(vision["patch_size"])
    qwen = cut == "grid"
    layers = int(vision["depth" if qwen else "num_hidden_layers"])
    frames = int(vision["temporal_patch_size"]) if qwen else 1
    windows = "window_size" in vision and qwen
    merged, projections = _projector(kind, config, hidden, int(text["hidden_size"]))
    return TowerShape(
        model_type=kind,
        cut=cut,
        hidden_size=hidden,
        intermediate_size=int(vision["intermediate_size"]),
        layers=layers,
        gated=kind == "qwen2_5_vl" or cut == "rows",
        patch_size=patch,
        patch_values=CHANNELS * frames * patch**2,
        merged=merged,
        image_size=0 if cut in ("grid", "rows") else side_of(vision["image_size"]),
        # a window has whole squares of merged patches
        window=int(vision["window_size"]) // (merged * patch) * merged if windows else 0,
        full_layers=len(set(vision["fullatt_block_indexes"])) if windows else layers,
        projections=projections,
        parameters=parameters,
        projector_parameters=projector_parameters,
        more_tokens=more_tokens(config),
        most_tiles=most_tiles(config),
        class_tokens=1 if vision.get("model_type") in CLASSED else 0,
        activation=str(vision.get("hidden_act") or "gelu"),
        scaled=kind == "internvl",
    )


def cut_of(config: Mapping[str, Any]) -> ImageCut:
    """How a model of a config of IMAGE_TYPES cuts an image."""
    any_size = config["vision_config"].get("model_type") == ANY_SIZE
    return "rows" if any_size else CUTS[config["model_type"]]


def side_of(size: Any) -> int:
    """A size of a config in pixels, which InternVL states as height and width."""
    return int(size if isinstance(size, int) else size[0])


def more_tokens(config: Mapping[str, Any]) -> int:
    """Tokens that an image has beyond one for each square of patches: that of the class, which
    CLIP's towers put in front, where it is kept; -1 where another tower's first patch is left out.
    """
    if cut_of(config) != "whole":
        return 0
    classes = 1 if config["vision_config"].get("model_type") in CLASSED else 0
    first_left_out = config.get("vision_feature_select_strategy", "default") == "default"
    return classes - first_left_out


def most_tiles(config: Mapping[str, Any]) -> int:
    """Of LLaVA-OneVision: of how many tiles the features of an image are kept, "anyres_max_9"; what
    has more is made smaller. 0: of all.
    """
    most = str(config.get("vision_aspect_ratio") or "").removeprefix("anyres_max_")
    return int(most) if most.isdecimal() else 0


def _projector(
    kind: str, config: Mapping[str, Any], hidden: int, text: int
) -> tuple[int, tuple[tuple[int, int], ...]]:
    """(patches of a token's side, (inputs, outputs) of the products for a token)."""
    vision = config["vision_config"]
    if kind == "gemma3":  # the mean of a square of patches, and one matrix
        side = int(vision["image_size"]) // int(vision["patch_size"])
        return side // int(config["mm_tokens_per_image"] ** 0.5), ((hidden, text),)
    if CUTS[kind] == "tiles":
        merged = int(config["scale_factor"])
        return merged, ((hidden * merged**2, text),)
    if kind == "internvl":
        merged = round(1 / float(config["downsample_ratio"]))
        return merged, ((hidden * merged**2, text), (text, text))
    if CUTS[kind] != "grid":
        layers = config["vision_feature_layer"]
        wide = hidden * (1 if isinstance(layers, int) else len(layers))
        if kind != "mistral3":
            return 1, ((wide, text), (text, text))
        merged = int(config["spatial_merge_size"])
        return merged, ((wide * merged**2, hidden), (hidden, text), (text, text))
    merged = int(vision["spatial_merge_size"])
    wide = hidden * merged**2
    mergers = 1 + len(vision.get("deepstack_visual_indexes") or ())
    return merged, mergers * ((wide, wide), (wide, int(vision["out_hidden_size"])))
